// Bindings of the block reader.
#include <nanobind/stl/unique_ptr.h>

#include <utility>

#include "bind/tensors.h"
#include "stream/block_reader.h"

namespace moestro {
namespace {

// A read that was begun, and what it reads into.
class Read {
 public:
  Read(std::shared_ptr<BlockReader> reader, int file, int64_t offset, Bytes1 to)
      : reader_(std::move(reader)), to_(std::move(to)) {
    std::byte* const memory = reinterpret_cast<std::byte*>(to_.data());
    const auto nbytes = int64_t(to_.shape(0));
    nb::gil_scoped_release release;
    reader_->submit(file, offset, nbytes, memory, &done_);
  }
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;
  ~Read() {
    if (done_.load(std::memory_order_acquire) != 0) return;
    nb::gil_scoped_release release;
    try {
      reader_->wait(done_);
    } catch (const Error&) {  // nobody asks any more
    }
  }
  void wait() {
    nb::gil_scoped_release release;
    reader_->wait(done_);
  }
  bool ended() {
    reader_->poll();
    return done_.load(std::memory_order_acquire) != 0;
  }

 private:
  const std::shared_ptr<BlockReader> reader_;
  const Bytes1 to_;
  std::atomic<int> done_{0};
};

ReaderOptions::Engine engine_named(const std::string& name) {
  if (name == "auto") return ReaderOptions::Engine::kAuto;
  if (name == "io_uring") return ReaderOptions::Engine::kUring;
  if (name == "pread") return ReaderOptions::Engine::kPread;
  throw invalid_request("unknown engine " + name + "; known are auto, io_uring, pread");
}

nb::dict stats_dict(const BlockReader& reader) {
  const ReaderStats stats = reader.stats();
  nb::list mirrors;
  bool direct = true;
  for (const MirrorStats& mirror : stats.mirrors) {
    nb::dict d;
    d["path"] = mirror.path;
    d["nbytes"] = mirror.bytes;
    d["busy_seconds"] = mirror.seconds;
    d["rate"] = mirror.rate;
    d["buffered"] = mirror.buffered;
    d["problem"] = mirror.problem;
    mirrors.append(d);
    direct = direct && mirror.buffered.empty();
  }
  nb::dict d;
  d["nbytes"] = stats.bytes;
  d["reads"] = stats.reads;
  d["failed"] = stats.failed;
  d["busy_seconds"] = stats.seconds;
  d["direct"] = direct;
  d["engine"] = stats.engine;
  d["engine_note"] = stats.engine_note;
  d["mirrors"] = mirrors;
  return d;
}

}  // namespace

void init_stream(nb::module_& m) {
  nb::class_<Read>(m, "Read", "A read that was begun.")
      .def("wait", &Read::wait, "Returns when the bytes are there; StorageError if they cannot be.")
      .def("ended", &Read::ended, "Whether it has been read or has failed; does not wait.");
  nb::class_<BlockReader, BlobReader>(
      m, "BlockReader",
      "Reads blocks of files past the page cache, many at once. files: for each file the paths of "
      "its copies, those at one index on one drive.")
      .def(
          "__init__",
          [](BlockReader* self, std::vector<std::vector<std::string>> files, int queue_depth,
             bool direct, const std::string& engine, int64_t piece_nbytes) {
            new (self) BlockReader(std::move(files), {.queue_depth = queue_depth,
                                                      .direct = direct,
                                                      .engine = engine_named(engine),
                                                      .piece_bytes = piece_nbytes});
          },
          nb::arg("files"), nb::kw_only(), nb::arg("queue_depth") = 8, nb::arg("direct") = true,
          nb::arg("engine") = "auto", nb::arg("piece_nbytes") = ReaderOptions{}.piece_bytes)
      .def("size", &BlockReader::size, nb::arg("file"))
      .def(
          "submit",
          [](std::shared_ptr<BlockReader> self, int file, int64_t offset, Bytes1 to) {
            return std::make_unique<Read>(std::move(self), file, offset, std::move(to));
          },
          nb::arg("file"), nb::arg("offset"), nb::arg("to").noconvert(),
          "Begins to fill a 4096-aligned array of bytes; waits while queue_depth reads are in "
          "flight.")
      .def("stats", &stats_dict);
  m.def("uring_refusal", &BlockReader::uring_refusal,
        "Why this system refuses io_uring; empty if it does not.");
}

}  // namespace moestro
