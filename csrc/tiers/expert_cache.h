// The experts of one layer that are in memory while all of them are on disk.
//
// A chunk of tokens needs some experts, in ascending order. begin() decides at once, from the
// selections alone, which of them are read into which slots and when each slot is free for that; so
// the same selections give the same residents however the reads are timed. Reads are issued in
// ascending order, at most one per expert and chunk. Experts become ready in any order and are
// finished in ascending order. One thread at a time drives a cache; stats() may come from any.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "tiers/blob_reader.h"
#include "tiers/policies.h"

namespace moestro {

struct CacheCounts {
  int64_t hits = 0, misses = 0, bytes = 0;
  std::vector<int64_t> shadow_misses;  // of each policy in policies()
};

struct CacheStats {
  CacheCounts prefill, decode;
  std::string policy;  // the one in use
  int64_t resident = 0;
  std::vector<double> selections;  // of each expert in this run
};

class ExpertCache {
 public:
  // Chunks of more tokens than this count as prefill.
  static constexpr int64_t kDecodeTokens = 16;

  // `memory`: slots * blob.nbytes bytes, 4096-aligned, used as long as the cache lives. `policy`: a
  // name of policies(), or "auto" for the one that does best. `queue_depth`: reads in flight.
  ExpertCache(std::shared_ptr<BlobReader> reader, BlobFile blobs, std::byte* memory, int64_t slots,
              int64_t experts, const std::string& policy, int queue_depth);
  ExpertCache(const ExpertCache&) = delete;
  ExpertCache& operator=(const ExpertCache&) = delete;
  ~ExpertCache();

  int64_t experts() const { return static_cast<int64_t>(slot_of_.size()); }
  int64_t slots() const { return static_cast<int64_t>(held_.size()); }
  CacheStats stats() const;
  void set_prior(std::span<const double> selections);

  // Begins a chunk. Positions below are indices in `wanted`, whose experts ascend.
  void begin(std::span<const Wanted> wanted, int64_t tokens);
  // Issues the reads that may be issued now.
  void submit();
  // Positions that have become ready since the last call, ascending. Throws the error of a read
  // that failed.
  const std::vector<int32_t>& ready();
  // Waits for the read that has been in flight for longest; there must be one.
  void wait();
  // The blob of a ready position.
  const uint8_t* blob(int32_t position) const;
  // Positions below `end` are not needed any more in this chunk.
  void finish(int64_t end) { finished_ = end; }
  // Whether a read could be in flight but for positions that have to be finished first.
  bool blocked() const;
  // Ends the chunk, also before all of it is finished: waits for what is in flight.
  void end();

 private:
  struct Need {
    int32_t expert;
    int32_t slot;
    int64_t after;  // the slot is free once positions below this are finished
    bool read;      // it has to be read
  };
  struct Victim {
    double value;
    int64_t after;
    int32_t slot;
    bool operator<(const Victim& other) const;
  };

  void plan();
  void take_from_needed(std::vector<bool>& keeps, int64_t spare);
  bool spared(Need& need);
  void take_victim(Need& need);
  void count(std::span<const Wanted> wanted, int64_t tokens,
             std::span<const int64_t> shadow_misses);
  bool take(size_t read);

  const std::shared_ptr<BlobReader> reader_;
  const BlobFile blobs_;
  std::byte* const memory_;
  const size_t queue_depth_;
  const bool chooses_policy_;
  size_t policy_;
  UsageLog usage_;
  ShadowCaches shadows_;
  std::vector<int32_t> slot_of_;  // by expert, -1: not in memory
  std::vector<int32_t> held_;     // by slot, the expert whose bytes it holds; -1: none
  // The chunk.
  std::vector<Need> needs_;
  std::vector<int32_t> reads_;  // positions, in the order of their reads
  std::vector<Victim> victims_;
  std::vector<int32_t> in_flight_, ready_, fresh_;
  std::unique_ptr<std::atomic<int>[]> done_;  // by slot
  size_t issued_ = 0;
  int64_t finished_ = 0;
  mutable std::mutex stats_mutex_;
  CacheStats stats_;
};

}  // namespace moestro
