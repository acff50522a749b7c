// A model of a disk, for tests: blobs come from memory, late, in any order, and fail on request.
#pragma once

#include <span>
#include <vector>

#include "tiers/blob_reader.h"

namespace moestro {

class ModelReader final : public BlobReader {
 public:
  // `files`: their bytes, which must outlive the reader. The order in which reads end follows from
  // `seed`.
  ModelReader(std::vector<std::span<const std::byte>> files, uint32_t seed);

  // The read after this many more fails; none if below zero.
  void fail_after(int64_t reads) { fail_after_ = reads; }
  int64_t reads() const { return reads_; }

  void submit(int file, int64_t offset, int64_t bytes, std::byte* to,
              std::atomic<int>* done) override;
  void poll() override;
  void wait(const std::atomic<int>& done) override;

 private:
  struct Read {
    std::span<const std::byte> from;
    std::byte* to;
    std::atomic<int>* done;
    bool fails;
  };
  uint32_t random(uint32_t below);
  void end_any();

  const std::vector<std::span<const std::byte>> files_;
  uint32_t state_;
  int64_t fail_after_ = -1;
  int64_t reads_ = 0;
  std::vector<Read> in_flight_;
};

}  // namespace moestro
