#include "tiers/policies.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace moestro {
namespace {

// A policy is left for one that misses this much less, and at most every so many chunks.
constexpr double kClearlyLess = 0.9;
constexpr int64_t kChunksBetweenSwitches = 64;
// What a miss still counts one chunk later, for comparing policies.
constexpr double kFading = 1 - 1.0 / 256;

constexpr Policy kPolicies[] = {
    // Frequency of late: what was hot in another conversation fades.
    {"lfu", [](const Usage& u, int64_t) { return u.decayed; }},
    {"lru", [](const Usage& u, int64_t) { return double(u.last); }},
    // Selections per token of age: a frequent expert outlives its absence for longer.
    {"lfru",
     [](const Usage& u, int64_t now) { return (u.prior + u.total) / double(now - u.last + 1); }},
    // What earlier runs selected most stays, whatever happens now.
    {"static", [](const Usage& u, int64_t) { return u.prior; }},
};

}  // namespace

std::span<const Policy> policies() { return kPolicies; }

size_t policy_named(const std::string& name) {
  std::string known;
  for (size_t i = 0; i < std::size(kPolicies); ++i) {
    if (name == kPolicies[i].name) return i;
    known += (i == 0 ? "" : ", ") + std::string(kPolicies[i].name);
  }
  throw invalid_request("no policy for experts is called " + name + "; known: " + known);
}

void UsageLog::add(std::span<const Wanted> wanted, int64_t tokens) {
  now_ += tokens;
  weight_ *= std::exp2(double(tokens) / kHalfLife);
  if (weight_ > 0x1p500) {
    for (Usage& usage : usage_) usage.decayed /= weight_;
    weight_ = 1;
  }
  for (const Wanted& w : wanted) {
    Usage& usage = usage_[size_t(w.expert)];
    usage.total += w.count;
    usage.decayed += weight_ * w.count;
    usage.last = now_;
  }
}

void UsageLog::set_prior(std::span<const double> selections) {
  if (selections.size() != usage_.size())
    throw invalid_request("a profile of " + std::to_string(selections.size()) +
                          " experts for a layer of " + std::to_string(usage_.size()));
  for (size_t e = 0; e < usage_.size(); ++e) {
    usage_[e].decayed += weight_ * (selections[e] - usage_[e].prior);
    usage_[e].prior = selections[e];
  }
}

ShadowCaches::ShadowCaches(int64_t experts, int64_t slots)
    : slots_(size_t(slots)),
      shadows_(std::size(kPolicies)),
      wanted_(size_t(experts)),
      misses_(shadows_.size()) {
  for (Shadow& shadow : shadows_) shadow.holds.resize(size_t(experts));
}

std::span<const int64_t> ShadowCaches::add(std::span<const Wanted> wanted, const UsageLog& usage) {
  for (const Wanted& w : wanted) wanted_[size_t(w.expert)] = true;
  for (size_t p = 0; p < shadows_.size(); ++p) {
    Shadow& shadow = shadows_[p];
    missed_.clear();
    for (const Wanted& w : wanted)
      if (!shadow.holds[size_t(w.expert)]) missed_.push_back(w);
    misses_[p] = int64_t(missed_.size());
    shadow.recent = kFading * shadow.recent + double(missed_.size());
    replace(shadow, p, missed_, usage);
  }
  for (const Wanted& w : wanted) wanted_[size_t(w.expert)] = false;
  ++chunks_since_switch_;
  return misses_;
}

// Each missed expert takes a free slot, or that of the least valuable expert the chunk does not
// need; when all are needed, of the least valuable one.
void ShadowCaches::replace(Shadow& shadow, size_t policy, std::span<const Wanted> missed,
                           const UsageLog& usage) {
  for (const Wanted& w : missed) {
    size_t slot = shadow.expert.size();
    if (slot < slots_) {
      shadow.expert.push_back(w.expert);
    } else {
      const auto rank = [&](int32_t expert) {
        return std::pair(bool(wanted_[size_t(expert)]), usage.value(policy, expert));
      };
      const auto least =
          std::ranges::min_element(shadow.expert, {}, [&](int32_t expert) { return rank(expert); });
      slot = size_t(least - shadow.expert.begin());
      shadow.holds[size_t(*least)] = false;
      *least = w.expert;
    }
    shadow.holds[size_t(w.expert)] = true;
  }
}

size_t ShadowCaches::best(size_t current) {
  if (chunks_since_switch_ < kChunksBetweenSwitches) return current;
  size_t best = current;
  for (size_t p = 0; p < shadows_.size(); ++p)
    if (shadows_[p].recent < shadows_[best].recent) best = p;
  if (shadows_[best].recent > kClearlyLess * shadows_[current].recent || best == current)
    return current;
  chunks_since_switch_ = 0;
  return best;
}

}  // namespace moestro
