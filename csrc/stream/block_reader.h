// Reads blocks of files from disk at the drive's full rate: unbuffered, many at once, from several
// copies (mirrors) of the files in proportion to the speed of the drives they are on.
//
// Pieces of reads go through a ReadQueue, io_uring or a pool of threads. No thread of the reader's
// own moves them on: completions are taken by whoever calls submit(), poll() or wait(). Every piece
// is checked after it has come (length, and that the file is still the one that was opened), so
// what `done` reports as read are the bytes of that file. A mirror that fails is replaced by
// another.
//
// All members may be called by several threads. After fork() the child gets a queue of its own;
// what was being read then is lost for it, and wait() says so.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "stream/read_queue.h"
#include "stream/source_file.h"
#include "tiers/blob_reader.h"

namespace moestro {

struct ReaderOptions {
  enum class Engine { kAuto, kUring, kPread };
  int queue_depth = 8;  // reads in flight per mirror, beyond which submit() waits; 1 to 256
  bool direct = true;   // past the page cache, where the file system can
  Engine engine = Engine::kAuto;
  int64_t piece_bytes = int64_t{4} << 20;  // longer reads are split into such pieces
};

struct MirrorStats {
  std::string path;      // of the first file
  int64_t bytes = 0;     // read
  double seconds = 0;    // with reads in flight
  double rate = 0;       // bytes per second of late; 0: unknown
  std::string buffered;  // why the page cache is used; empty if it is not
  std::string problem;   // the last failure; empty if there was none
};

struct ReaderStats {
  int64_t bytes = 0, reads = 0, failed = 0;
  double seconds = 0;       // with reads in flight, as far as completions were asked for
  std::string engine;       // "io_uring" or "pread"
  std::string engine_note;  // why not io_uring; empty if it is, or was not wanted
  std::vector<MirrorStats> mirrors;
};

class BlockReader final : public BlobReader {
 public:
  // Offsets, lengths and addresses are multiples of this.
  static constexpr int64_t kBlock = 4096;
  using MakeQueue = std::function<std::unique_ptr<ReadQueue>(int pieces, int threads)>;

  // `files`: for each file the paths of its copies, the same number for all; the copies at one
  // index are taken to be on one drive. Throws Error: kStorage for a file that cannot be opened or
  // copies that differ, kInvalidRequest for options out of range, kUnsupportedOp if io_uring is
  // demanded and refused. `make_queue`: for tests, a queue that fails as they like.
  BlockReader(std::vector<std::vector<std::string>> files, ReaderOptions options,
              MakeQueue make_queue = nullptr);
  ~BlockReader();  // waits for what is in flight

  int64_t size(int file) const;
  // Besides what BlobReader says: waits while the queue is full, and throws kInvalidRequest for
  // what is not a multiple of kBlock, kStorage for a range beyond the file's end.
  void submit(int file, int64_t offset, int64_t bytes, std::byte* to,
              std::atomic<int>* done) override;
  void poll() override;
  // Throws Error(kStorage) naming file, offset, wanted and got if the read failed.
  void wait(const std::atomic<int>& done) override;
  ReaderStats stats() const;

  // Why this system refuses io_uring; empty if it does not.
  static std::string uring_refusal();

 private:
  class State;
  State& state() const;

  const std::vector<std::vector<std::string>> paths_;
  const ReaderOptions options_;
  const MakeQueue make_queue_;
  std::vector<std::vector<Identity>> identities_;
  mutable std::atomic<State*> state_{nullptr};
};

}  // namespace moestro
