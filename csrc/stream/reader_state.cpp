#include "stream/reader_state.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace moestro {
namespace {

constexpr int64_t kBlock = BlockReader::kBlock;
// Attempts at a piece that get nowhere, before it counts as failed.
constexpr int kTries = 100;
// Failures that nobody asked about are forgotten beyond this many.
constexpr size_t kFailuresKept = 1024;

Drives::Time now() { return std::chrono::steady_clock::now(); }

double seconds_since(Drives::Time start) {
  return std::chrono::duration<double>(now() - start).count();
}

}  // namespace

std::string read_problem(const std::string& path, int64_t offset, int64_t wanted, int64_t got,
                         int error) {
  std::string text = path + ": wanted " + std::to_string(wanted) + " bytes at " +
                     std::to_string(offset) + ", got " + std::to_string(got);
  if (error != 0)
    text +=
        ": " + std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
  return text;
}

ReaderState::ReaderState(Files files, int depth, int64_t piece_bytes,
                         std::unique_ptr<ReadQueue> queue, std::string engine_note)
    : files_(std::move(files)),
      depth_(size_t(depth)),
      piece_bytes_(piece_bytes),
      queue_(std::move(queue)),
      engine_note_(std::move(engine_note)),
      drives_(int(files_.front().size())),
      problems_(files_.front().size()) {
  completions_.reserve(kPieces);
}

ReaderState::~ReaderState() {
  Lock lock(mutex_);
  while (!requests_.empty()) take(true, lock);
}

std::vector<std::vector<Identity>> ReaderState::identities() const {
  std::vector<std::vector<Identity>> all;
  for (const auto& copies : files_) {
    auto& of_file = all.emplace_back();
    for (const auto& copy : copies) of_file.push_back(copy->identity());
  }
  return all;
}

SourceFile& ReaderState::source(const Piece& piece) const {
  return *files_[size_t(piece.request->file)][size_t(piece.drive)];
}

void ReaderState::submit(int file, int64_t offset, int64_t bytes, std::byte* to,
                         std::atomic<int>* done) {
  Lock lock(mutex_);
  while (requests_.size() >= depth_) take(true, lock);
  std::unique_ptr<Request> request;
  if (spare_.empty()) {
    request = std::make_unique<Request>();
  } else {
    request = std::move(spare_.back());
    spare_.pop_back();
  }
  request->file = file;
  request->offset = offset;
  request->bytes = bytes;
  request->to = to;
  request->done = done;
  request->pieces.clear();
  request->problem.clear();
  // Pieces as equal as they can be, so that all end at about the same time.
  const int64_t count = (bytes + piece_bytes_ - 1) / piece_bytes_;
  const int64_t blocks = bytes / kBlock;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = blocks * i / count * kBlock, end = blocks * (i + 1) / count * kBlock;
    Piece piece;
    piece.request = request.get();
    piece.offset = offset + first;
    piece.bytes = end - first;
    piece.to = to + first;
    request->pieces.push_back(piece);
  }
  request->left = request->pieces.size();
  for (Piece& piece : request->pieces) pending_.push_back(&piece);
  failures_.erase(done);
  if (requests_.empty()) since_ = now();
  requests_.push_back(std::move(request));
  pump();
}

// Begins what waits, as far as there is room.
void ReaderState::pump() {
  while (!pending_.empty() && issued_ < kPieces) {
    while (!pending_.empty() && issued_ < kPieces) {
      Piece* piece = pending_.front();
      pending_.pop_front();
      issue(*piece);
    }
    refused_.clear();
    queue_->flush(refused_);
    for (const Completion& completion : refused_) ended(completion);
  }
}

void ReaderState::issue(Piece& piece) {
  const int64_t left = piece.bytes - piece.got;
  if (piece.drive < 0) {
    const uint64_t all = ~uint64_t{0} >> (64 - files_.front().size());
    uint64_t usable = all & ~piece.failed_on, sound = 0;
    for (size_t d = 0; d < problems_.size(); ++d)
      if (problems_[d].empty()) sound |= uint64_t{1} << d;
    if ((usable & sound) != 0) usable &= sound;
    piece.drive = drives_.choose(usable, left);
  }
  piece.issued = left;
  drives_.begin(piece.drive, left, now());
  ++issued_;
  queue_->issue({source(piece).fd(), piece.offset + piece.got, left, piece.to + piece.got, &piece});
}

void ReaderState::poll() {
  Lock lock(mutex_);
  if (!requests_.empty()) take(false, lock);
}

void ReaderState::wait(const std::atomic<int>& done) {
  Lock lock(mutex_);
  while (done.load(std::memory_order_acquire) == 0) {
    if (!reading(done))
      throw Error(ErrorKind::kStorage,
                  "nothing is being read for this; what was begun before a fork is lost after it");
    take(true, lock);
  }
  if (done.load(std::memory_order_acquire) != 1) throw Error(ErrorKind::kStorage, why_failed(done));
}

// Takes what has ended; with `block` returns only once something may have changed. One thread at a
// time is in the queue, others wait for it.
void ReaderState::take(bool block, Lock& lock) {
  if (taking_) {
    if (block) changed_.wait(lock);
    return;
  }
  completions_.clear();
  if (block) {
    taking_ = true;
    lock.unlock();
    queue_->reap(completions_, true);
    lock.lock();
    taking_ = false;
  } else {
    queue_->reap(completions_, false);
  }
  for (const Completion& completion : completions_) ended(completion);
  pump();
  changed_.notify_all();
}

void ReaderState::ended(const Completion& completion) {
  Piece& piece = *static_cast<Piece*>(completion.tag);
  --issued_;
  const int64_t got = std::clamp<int64_t>(completion.result, 0, piece.issued);
  drives_.end(piece.drive, piece.issued, got, now());
  std::string problem;
  if (continues(piece, completion.result, problem) ||
      (!problem.empty() && other_drive(piece, problem))) {
    pending_.push_front(&piece);
    return;
  }
  Request& request = *piece.request;
  if (request.problem.empty()) request.problem = problem;
  if (--request.left == 0) finish(request);
}

// Whether the piece has to be read on. If it does not, it is whole, or `problem` says what is
// wrong.
bool ReaderState::continues(Piece& piece, int64_t result, std::string& problem) {
  SourceFile& file = source(piece);
  const auto fail = [&](int error, const std::string& why) {
    problem = read_problem(file.path(), piece.request->offset, piece.request->bytes,
                           piece.offset - piece.request->offset + piece.got, error) +
              why;
    return false;
  };
  if (result > 0) piece.got += std::min(result, piece.issued);
  // Asked after every piece: what came before the file was written to is still good.
  if (const std::string change = file.change(); !change.empty())
    return fail(0, ": " + change + "; put the file back and start again");
  if (result > piece.issued) return fail(0, ": the system gave more than was asked for");
  if (result > 0) {
    if (piece.got == piece.bytes) return false;
    const int64_t before = piece.bytes - piece.issued;
    piece.got = piece.got / kBlock * kBlock;  // unbuffered reads begin at whole blocks
    if (piece.got > before) piece.tries = 0;
  }
  const bool retries = ++piece.tries < kTries;
  if (result == -EINTR || result == -EAGAIN || result == -ECANCELED || result > 0)
    return retries || fail(result < 0 ? int(-result) : 0, ": the reads end too early");
  if (result == 0) return fail(0, ": the file ends there");
  if (result == -EINVAL && retries && file.leave_direct("refuses some reads past the page cache"))
    return true;
  return fail(int(-result), "");
}

// Whether a piece that failed on its drive can be read from another.
bool ReaderState::other_drive(Piece& piece, const std::string& problem) {
  problems_[size_t(piece.drive)] = problem;
  piece.failed_on |= uint64_t{1} << piece.drive;
  const uint64_t all = ~uint64_t{0} >> (64 - problems_.size());
  if ((all & ~piece.failed_on) == 0) return false;
  piece.drive = -1;
  piece.got = 0;
  piece.tries = 0;
  return true;
}

void ReaderState::finish(Request& request) {
  const bool whole = request.problem.empty();
  reads_ += whole;
  failed_ += !whole;
  if (whole) bytes_ += request.bytes;
  if (!whole) {
    if (failures_.size() >= kFailuresKept) failures_.erase(failures_.begin());
    failures_[request.done] = request.problem;
  }
  std::atomic<int>* const done = request.done;
  const auto at = std::find_if(requests_.begin(), requests_.end(),
                               [&](const auto& r) { return r.get() == &request; });
  spare_.push_back(std::move(*at));
  requests_.erase(at);
  if (requests_.empty()) seconds_ += seconds_since(since_);
  done->store(whole ? 1 : 2, std::memory_order_release);
}

bool ReaderState::reading(const std::atomic<int>& done) const {
  return std::any_of(requests_.begin(), requests_.end(),
                     [&](const auto& r) { return r->done == &done; });
}

std::string ReaderState::why_failed(const std::atomic<int>& done) const {
  const auto found = failures_.find(&done);
  return found != failures_.end() ? found->second : "a read failed";
}

ReaderStats ReaderState::stats() const {
  const Lock lock(mutex_);
  ReaderStats stats;
  stats.bytes = bytes_;
  stats.reads = reads_;
  stats.failed = failed_;
  stats.seconds = seconds_ + (requests_.empty() ? 0 : seconds_since(since_));
  stats.engine = queue_->name();
  stats.engine_note = engine_note_;
  for (size_t d = 0; d < problems_.size(); ++d) {
    const Drives::Drive& drive = drives_[int(d)];
    const SourceFile& file = *files_.front()[d];
    stats.mirrors.push_back(
        {file.path(), drive.bytes, drive.seconds, drive.rate, file.buffered(), problems_[d]});
  }
  return stats;
}

}  // namespace moestro
