// What the expert cache needs of whatever reads blobs: the disk reader, or a model of it in tests.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace moestro {

class BlobReader {
 public:
  virtual ~BlobReader() = default;
  // Begins to read [offset, offset + bytes) of a file; sets `done` to 1 (release) when they are
  // there, to 2 when they cannot be had. Until then `to` and `done` must stay.
  virtual void submit(int file, int64_t offset, int64_t bytes, std::byte* to,
                      std::atomic<int>* done) = 0;
  // Sets what has come, without waiting.
  virtual void poll() = 0;
  // Returns when `done` is 1; throws Error naming what failed when it is 2.
  virtual void wait(const std::atomic<int>& done) = 0;
};

// Where the blobs of one layer's experts lie: one after the other, each `nbytes` long.
struct BlobFile {
  int file;
  int64_t offset;
  int64_t nbytes;
};

}  // namespace moestro
