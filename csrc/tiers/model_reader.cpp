#include "tiers/model_reader.h"

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "core/error.h"

namespace moestro {

ModelReader::ModelReader(std::vector<std::span<const std::byte>> files, uint32_t seed)
    : files_(std::move(files)), state_(seed * 2654435761u + 1) {}

// xorshift32
uint32_t ModelReader::random(uint32_t below) {
  state_ ^= state_ << 13;
  state_ ^= state_ >> 17;
  state_ ^= state_ << 5;
  return (state_ >> 8) % below;
}

void ModelReader::submit(int file, int64_t offset, int64_t bytes, std::byte* to,
                         std::atomic<int>* done) {
  const auto from = files_.at(size_t(file)).subspan(size_t(offset), size_t(bytes));
  // What is read too early is garbage.
  std::memset(to, 0x5a, size_t(bytes));
  in_flight_.push_back({from, to, done, fail_after_ == 0});
  fail_after_ -= fail_after_ >= 0;
  ++reads_;
}

void ModelReader::end_any() {
  const uint32_t index = random(uint32_t(in_flight_.size()));
  const Read read = in_flight_[index];
  in_flight_.erase(in_flight_.begin() + index);
  if (!read.fails) std::memcpy(read.to, read.from.data(), read.from.size());
  read.done->store(read.fails ? 2 : 1, std::memory_order_release);
}

void ModelReader::poll() {
  while (!in_flight_.empty() && random(3) == 0) end_any();
}

void ModelReader::wait(const std::atomic<int>& done) {
  while (done.load(std::memory_order_acquire) == 0) {
    if (random(4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random(100)));
    end_any();
  }
  if (done.load(std::memory_order_acquire) == 2)
    throw Error(ErrorKind::kStorage, "a read of the model disk failed, as asked");
}

}  // namespace moestro
