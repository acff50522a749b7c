#include "tiers/expert_cache.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "core/error.h"

namespace moestro {
namespace {

// Where a chunk needs more experts than there are slots, this many slots more than the queue is
// deep do not keep experts for later in the chunk, so that some are read while others compute.
constexpr int64_t kComputingSlots = 2;
constexpr double kEmpty = -std::numeric_limits<double>::infinity();

}  // namespace

ExpertCache::ExpertCache(std::shared_ptr<BlobReader> reader, BlobFile blobs, std::byte* memory,
                         int64_t slots, int64_t experts, const std::string& policy, int queue_depth)
    : reader_(std::move(reader)),
      blobs_(blobs),
      memory_(memory),
      queue_depth_(size_t(std::max(queue_depth, 1))),
      chooses_policy_(policy == "auto"),
      policy_(chooses_policy_ ? 0 : policy_named(policy)),
      usage_(experts),
      shadows_(experts, slots),
      slot_of_(size_t(experts), -1),
      held_(size_t(slots), -1),
      done_(new std::atomic<int>[size_t(slots)]) {
  if (slots < 1 || slots > experts)
    throw invalid_request("slots for experts must be between 1 and " + std::to_string(experts) +
                          ", got " + std::to_string(slots));
  stats_.policy = policies()[policy_].name;
  stats_.selections.resize(size_t(experts));
  for (CacheCounts* counts : {&stats_.prefill, &stats_.decode})
    counts->shadow_misses.resize(policies().size());
}

ExpertCache::~ExpertCache() { end(); }

CacheStats ExpertCache::stats() const {
  const std::lock_guard lock(stats_mutex_);
  return stats_;
}

void ExpertCache::set_prior(std::span<const double> selections) { usage_.set_prior(selections); }

void ExpertCache::begin(std::span<const Wanted> wanted, int64_t tokens) {
  end();
  usage_.add(wanted, tokens);
  const auto shadow_misses = shadows_.add(wanted, usage_);
  if (chooses_policy_) policy_ = shadows_.best(policy_);
  needs_.clear();
  for (const Wanted& w : wanted) {
    const int32_t slot = slot_of_[size_t(w.expert)];
    needs_.push_back({.expert = w.expert, .slot = slot, .after = 0, .read = slot < 0});
  }
  plan();
  for (size_t i = 0; i < needs_.size(); ++i)
    if (!needs_[i].read) fresh_.push_back(int32_t(i));
  count(wanted, tokens, shadow_misses);
}

void ExpertCache::count(std::span<const Wanted> wanted, int64_t tokens,
                        std::span<const int64_t> shadow_misses) {
  const std::lock_guard lock(stats_mutex_);
  CacheCounts& counts = tokens > kDecodeTokens ? stats_.prefill : stats_.decode;
  counts.hits += int64_t(needs_.size() - reads_.size());
  counts.misses += int64_t(reads_.size());
  counts.bytes += int64_t(reads_.size()) * blobs_.nbytes;
  for (size_t p = 0; p < shadow_misses.size(); ++p) counts.shadow_misses[p] += shadow_misses[p];
  for (const Wanted& w : wanted) stats_.selections[size_t(w.expert)] += w.count;
  stats_.policy = policies()[policy_].name;
}

// Of the slots that may be taken: the least valuable, of equals the one that is free first.
bool ExpertCache::Victim::operator<(const Victim& other) const {
  return std::tie(value, after, slot) < std::tie(other.value, other.after, other.slot);
}

// Slots and reads of a chunk. If all it needs fits, no expert it needs leaves. Otherwise `spare`
// slots at a time go through the experts in ascending order: the slot of an expert that is finished
// by then may be taken again. Experts that are in memory already stay for it where possible.
void ExpertCache::plan() {
  const int64_t needed = int64_t(needs_.size());
  const bool in_waves = needed > slots();
  const int64_t spare = std::min(
      {slots(), std::max<int64_t>(1, slots() / 2), int64_t(queue_depth_) + kComputingSlots});
  std::vector<bool> keeps(held_.size());
  for (const Need& need : needs_)
    if (!need.read) keeps[size_t(need.slot)] = true;
  if (in_waves) take_from_needed(keeps, spare);
  for (size_t s = 0; s < held_.size(); ++s)
    if (!keeps[s])
      victims_.push_back({.value = held_[s] < 0 ? kEmpty : usage_.value(policy_, held_[s]),
                          .after = 0,
                          .slot = int32_t(s)});
  std::vector<int32_t> took;  // positions that took a slot of those to be had
  int64_t passed = 0;         // positions whose slots have become victims
  for (int64_t i = 0; i < needed; ++i) {
    Need& need = needs_[size_t(i)];
    if (!need.read) continue;
    if (in_waves && int64_t(took.size()) >= spare)
      for (const int64_t end = took[took.size() - size_t(spare)]; passed <= end; ++passed) {
        const Need& done = needs_[size_t(passed)];
        victims_.push_back(
            {.value = usage_.value(policy_, done.expert), .after = passed + 1, .slot = done.slot});
      }
    took.push_back(int32_t(i));
    if (need.slot >= 0 && spared(need)) continue;
    take_victim(need);
    reads_.push_back(int32_t(i));
  }
}

// Gives up experts that are needed, the last first, until `spare` slots are free for reads.
void ExpertCache::take_from_needed(std::vector<bool>& keeps, int64_t spare) {
  int64_t free = std::count(keeps.begin(), keeps.end(), false);
  for (size_t i = needs_.size(); i-- > 0 && free < spare;) {
    if (needs_[i].read) continue;
    keeps[size_t(needs_[i].slot)] = false;
    needs_[i].read = true;
    ++free;
  }
}

// Whether an expert that was given up is still where it was when its turn comes.
bool ExpertCache::spared(Need& need) {
  const auto same = [&](const Victim& v) { return v.slot == need.slot && v.after == 0; };
  const auto found = std::find_if(victims_.begin(), victims_.end(), same);
  if (found == victims_.end()) return false;
  victims_.erase(found);
  need.read = false;
  return true;
}

void ExpertCache::take_victim(Need& need) {
  const auto least = std::min_element(victims_.begin(), victims_.end());
  need.slot = least->slot;
  need.after = least->after;
  victims_.erase(least);
}

bool ExpertCache::blocked() const {
  return issued_ < reads_.size() && in_flight_.size() < queue_depth_ &&
         needs_[size_t(reads_[issued_])].after > finished_;
}

void ExpertCache::submit() {
  for (; issued_ < reads_.size() && in_flight_.size() < queue_depth_; ++issued_) {
    const Need& need = needs_[size_t(reads_[issued_])];
    if (need.after > finished_) break;
    int32_t& held = held_[size_t(need.slot)];
    if (held >= 0) slot_of_[size_t(held)] = -1;
    held = -1;
    std::atomic<int>& done = done_[size_t(need.slot)];
    done.store(0, std::memory_order_relaxed);
    reader_->submit(blobs_.file, blobs_.offset + need.expert * blobs_.nbytes, blobs_.nbytes,
                    memory_ + need.slot * blobs_.nbytes, &done);
    in_flight_.push_back(reads_[issued_]);
  }
}

const std::vector<int32_t>& ExpertCache::ready() {
  if (!in_flight_.empty()) reader_->poll();
  for (size_t i = 0; i < in_flight_.size();)
    if (!take(i)) ++i;
  ready_.swap(fresh_);
  fresh_.clear();
  std::sort(ready_.begin(), ready_.end());
  return ready_;
}

// Whether the read is over. Its expert is in memory from now on.
bool ExpertCache::take(size_t read) {
  const int32_t position = in_flight_[read];
  const Need& need = needs_[size_t(position)];
  const std::atomic<int>& done = done_[size_t(need.slot)];
  if (done.load(std::memory_order_acquire) == 0) return false;
  in_flight_.erase(in_flight_.begin() + int64_t(read));
  reader_->wait(done);  // throws if it failed
  held_[size_t(need.slot)] = need.expert;
  slot_of_[size_t(need.expert)] = need.slot;
  fresh_.push_back(position);
  return true;
}

void ExpertCache::wait() {
  const Need& need = needs_[size_t(in_flight_.front())];
  try {
    reader_->wait(done_[size_t(need.slot)]);
  } catch (...) {
    in_flight_.erase(in_flight_.begin());
    throw;
  }
}

const uint8_t* ExpertCache::blob(int32_t position) const {
  return reinterpret_cast<const uint8_t*>(memory_ + needs_[size_t(position)].slot * blobs_.nbytes);
}

void ExpertCache::end() {
  // What failed is not in memory, and the chunk that needed it is over.
  while (!in_flight_.empty()) {
    try {
      wait();
      take(0);
    } catch (...) {
      continue;
    }
  }
  reads_.clear();
  victims_.clear();
  fresh_.clear();
  needs_.clear();
  issued_ = 0;
  finished_ = 0;
  const std::lock_guard lock(stats_mutex_);
  stats_.resident = std::count_if(held_.begin(), held_.end(), [](int32_t e) { return e >= 0; });
}

}  // namespace moestro
