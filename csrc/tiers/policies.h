// Which expert leaves a full cache: a table of policies, and caches of ids that compare them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace moestro {

// One expert a chunk needs, and how many (token, slot) pairs selected it.
struct Wanted {
  int32_t expert;
  int32_t count;
};

// What is known of one expert's use. Time counts tokens.
struct Usage {
  double prior = 0;    // selections of earlier runs, from a profile
  double total = 0;    // selections of this run
  double decayed = 0;  // selections, each half as heavy per kHalfLife tokens it is older
  int64_t last = -1;   // time of the last chunk that selected it
};

// The expert of least value leaves; among equals the one in the lowest slot. A new policy is one
// row of the table in policies.cpp.
struct Policy {
  const char* name;
  double (*value)(const Usage& usage, int64_t now);
};
std::span<const Policy> policies();
// Index in policies(). Throws InvalidRequest listing the known names.
size_t policy_named(const std::string& name);

// The use of all experts of a layer.
class UsageLog {
 public:
  static constexpr double kHalfLife = 1024;

  explicit UsageLog(int64_t experts) : usage_(size_t(experts)) {}
  void add(std::span<const Wanted> wanted, int64_t tokens);
  void set_prior(std::span<const double> selections);
  double value(size_t policy, int32_t expert) const {
    return policies()[policy].value(usage_[size_t(expert)], now_);
  }
  const Usage& of(int32_t expert) const { return usage_[size_t(expert)]; }

 private:
  std::vector<Usage> usage_;
  double weight_ = 1;  // of a selection now; it grows instead of all others shrinking
  int64_t now_ = 0;
};

// Every policy's cache of `slots` experts, by ids alone: what each would have missed on the same
// selections, and which one to use.
class ShadowCaches {
 public:
  ShadowCaches(int64_t experts, int64_t slots);
  // One chunk, its experts ascending. Returns the misses of each policy.
  std::span<const int64_t> add(std::span<const Wanted> wanted, const UsageLog& usage);
  // The policy to use when `current` is in use: another one only if it has missed clearly less of
  // late, and not again soon.
  size_t best(size_t current);

 private:
  struct Shadow {
    std::vector<int32_t> expert;  // of each slot
    std::vector<bool> holds;      // by expert
    double recent = 0;            // misses, older ones fading
  };
  void replace(Shadow& shadow, size_t policy, std::span<const Wanted> missed,
               const UsageLog& usage);

  const size_t slots_;
  std::vector<Shadow> shadows_;
  std::vector<bool> wanted_;
  std::vector<Wanted> missed_;
  std::vector<int64_t> misses_;
  int64_t chunks_since_switch_ = 0;
};

}  // namespace moestro
