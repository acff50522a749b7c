#include "stream/block_reader.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "stream/reader_state.h"

namespace moestro {
namespace {

constexpr int kMostDepth = 256, kMostMirrors = 64;

// How often this process has been forked off, in its line of ancestors.
std::atomic<int> generation{0};
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { ++generation; });

ReaderOptions checked(ReaderOptions options) {
  if (options.queue_depth < 1 || options.queue_depth > kMostDepth)
    throw invalid_request("queue_depth must be between 1 and " + std::to_string(kMostDepth) +
                          ", got " + std::to_string(options.queue_depth));
  if (options.piece_bytes < BlockReader::kBlock || options.piece_bytes % BlockReader::kBlock != 0 ||
      options.piece_bytes > int64_t{1} << 30)
    throw invalid_request("piece_bytes must be a multiple of 4096 up to 1 GiB, got " +
                          std::to_string(options.piece_bytes));
  return options;
}

using Paths = std::vector<std::vector<std::string>>;

Paths checked(Paths paths) {
  if (paths.empty()) throw invalid_request("a reader needs at least one file");
  for (const auto& copies : paths)
    if (copies.empty() || copies.size() > size_t(kMostMirrors) ||
        copies.size() != paths.front().size())
      throw invalid_request("each file needs as many copies as the others, 1 to " +
                            std::to_string(kMostMirrors) + ", got " +
                            std::to_string(copies.size()) + " and " +
                            std::to_string(paths.front().size()));
  return paths;
}

std::unique_ptr<ReadQueue> system_queue(const ReaderOptions& options, int pieces, int threads,
                                        std::string& note) {
  using Engine = ReaderOptions::Engine;
  if (options.engine != Engine::kPread) {
    if (auto queue = make_uring_queue(pieces, note)) return queue;
    if (options.engine == Engine::kUring)
      throw Error(ErrorKind::kUnsupportedOp,
                  "io_uring is not possible here: " + note + "; leave the engine to choose itself");
  }
  return make_pread_queue(threads);
}

// Copies must be copies: a few blocks from everywhere tell those that are not.
void compare_copies(const std::vector<std::unique_ptr<SourceFile>>& copies) {
  struct alignas(BlockReader::kBlock) Block {
    std::byte bytes[BlockReader::kBlock];
  };
  const auto blocks = std::make_unique<Block[]>(2);
  const SourceFile& first = *copies.front();
  for (const auto& copy : copies) {
    const int64_t size = first.identity().size;
    if (copy->identity().size != size)
      throw Error(ErrorKind::kStorage,
                  copy->path() + " has " + std::to_string(copy->identity().size) + " bytes, but " +
                      first.path() + ", of which it should be a copy, " + std::to_string(size));
    const int64_t whole = size / BlockReader::kBlock;
    for (int64_t i = 0; copy != copies.front() && i < std::min<int64_t>(whole, 4); ++i) {
      const int64_t offset = (whole - 1) * i / 3 * BlockReader::kBlock;
      for (int side = 0; side < 2; ++side) {
        const SourceFile& file = side == 0 ? first : *copy;
        if (const int error = read_block(file.fd(), offset, blocks[side].bytes))
          throw Error(ErrorKind::kStorage,
                      read_problem(file.path(), offset, BlockReader::kBlock, 0, error));
      }
      if (std::memcmp(blocks[0].bytes, blocks[1].bytes, BlockReader::kBlock) != 0)
        throw Error(ErrorKind::kStorage, copy->path() + " is no copy of " + first.path() +
                                             ": they differ at byte " + std::to_string(offset));
    }
  }
}

}  // namespace

// The reader in one process: of the one that made it, or of a child.
class BlockReader::State : public ReaderState {
 public:
  State(Files files, int depth, int64_t piece_bytes, std::unique_ptr<ReadQueue> queue,
        std::string note)
      : ReaderState(std::move(files), depth, piece_bytes, std::move(queue), std::move(note)) {}
  const int generation = moestro::generation.load();

  static std::unique_ptr<State> make(const Paths& paths, const ReaderOptions& options,
                                     const MakeQueue& make_queue) {
    Files files;
    for (const auto& copies : paths) {
      auto& opened = files.emplace_back();
      for (const std::string& path : copies)
        opened.push_back(std::make_unique<SourceFile>(path, options.direct));
      compare_copies(opened);
    }
    const int depth = options.queue_depth * int(paths.front().size());
    const int threads = std::min(depth, 64);
    std::string note;
    auto queue = make_queue ? make_queue(ReaderState::kPieces, threads)
                            : system_queue(options, ReaderState::kPieces, threads, note);
    return std::make_unique<State>(std::move(files), depth, options.piece_bytes, std::move(queue),
                                   std::move(note));
  }
};

BlockReader::BlockReader(Paths files, ReaderOptions options, MakeQueue make_queue)
    : paths_(checked(std::move(files))),
      options_(checked(options)),
      make_queue_(std::move(make_queue)) {
  auto state = State::make(paths_, options_, make_queue_);
  identities_ = state->identities();
  state_ = state.release();
}

BlockReader::~BlockReader() {
  const State* state = state_.load();
  // What a parent had is its own: its locks and threads do not exist here.
  if (state->generation == generation.load()) delete state;
}

BlockReader::State& BlockReader::state() const {
  State* now = state_.load(std::memory_order_acquire);
  if (now->generation == generation.load(std::memory_order_relaxed)) return *now;
  auto made = State::make(paths_, options_, make_queue_);
  const auto identities = made->identities();
  for (size_t f = 0; f < paths_.size(); ++f)
    for (size_t m = 0; m < paths_[f].size(); ++m)
      if (identities[f][m] != identities_[f][m])
        throw Error(ErrorKind::kStorage,
                    paths_[f][m] + " is not the file any more that was opened before the fork");
  // The parent's is left alone: it may have been in the middle of something.
  if (state_.compare_exchange_strong(now, made.get())) return *made.release();
  return *now;
}

int64_t BlockReader::size(int file) const { return identities_.at(size_t(file)).front().size; }

void BlockReader::submit(int file, int64_t offset, int64_t bytes, std::byte* to,
                         std::atomic<int>* done) {
  if (file < 0 || size_t(file) >= paths_.size())
    throw invalid_request("there is no file " + std::to_string(file) + " to read, of " +
                          std::to_string(paths_.size()));
  const auto address = reinterpret_cast<uintptr_t>(to);
  if (offset < 0 || bytes <= 0 || offset % kBlock != 0 || bytes % kBlock != 0 ||
      address % kBlock != 0)
    throw invalid_request(
        "reads of whole blocks of 4096 bytes at their multiples are possible, not " +
        std::to_string(bytes) + " bytes at " + std::to_string(offset));
  if (offset > size(file) || bytes > size(file) - offset)
    throw Error(ErrorKind::kStorage,
                read_problem(paths_[size_t(file)].front(), offset, bytes, 0, 0) +
                    ": the file has " + std::to_string(size(file)) + " bytes");
  state().submit(file, offset, bytes, to, done);
}

void BlockReader::poll() { state().poll(); }

void BlockReader::wait(const std::atomic<int>& done) {
  if (done.load(std::memory_order_acquire) != 1) state().wait(done);
}

ReaderStats BlockReader::stats() const { return state().stats(); }

std::string BlockReader::uring_refusal() {
  std::string refusal;
  make_uring_queue(1, refusal);
  return refusal;
}

}  // namespace moestro
