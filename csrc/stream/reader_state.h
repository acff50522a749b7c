// What a BlockReader has in flight, and how pieces of it end: continued, repeated, read from
// another mirror, or failed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "stream/block_reader.h"
#include "stream/drives.h"
#include "stream/read_queue.h"
#include "stream/source_file.h"

namespace moestro {

// "FILE: wanted N bytes at OFFSET, got M: WHY" with the system's words for `error`, if not 0.
std::string read_problem(const std::string& path, int64_t offset, int64_t wanted, int64_t got,
                         int error);

class ReaderState {
 public:
  static constexpr int kPieces = 256;                                   // in flight at most
  using Files = std::vector<std::vector<std::unique_ptr<SourceFile>>>;  // [file][mirror]

  // `depth`: reads in flight at most, over all mirrors.
  ReaderState(Files files, int depth, int64_t piece_bytes, std::unique_ptr<ReadQueue> queue,
              std::string engine_note);
  ~ReaderState();

  std::vector<std::vector<Identity>> identities() const;
  void submit(int file, int64_t offset, int64_t bytes, std::byte* to, std::atomic<int>* done);
  void poll();
  void wait(const std::atomic<int>& done);
  ReaderStats stats() const;

 private:
  struct Request;
  struct Piece {
    Request* request;
    int64_t offset, bytes;
    std::byte* to;
    int64_t got = 0, issued = 0;
    int drive = -1;
    int tries = 0;
    uint64_t failed_on = 0;  // bit per drive
  };
  struct Request {
    int file;
    int64_t offset, bytes;
    std::byte* to;
    std::atomic<int>* done;
    std::vector<Piece> pieces;
    size_t left;
    std::string problem;
  };
  using Lock = std::unique_lock<std::mutex>;

  SourceFile& source(const Piece& piece) const;
  void pump();
  void issue(Piece& piece);
  void take(bool block, Lock& lock);
  void ended(const Completion& completion);
  bool continues(Piece& piece, int64_t result, std::string& problem);
  bool other_drive(Piece& piece, const std::string& problem);
  void finish(Request& request);
  bool reading(const std::atomic<int>& done) const;
  std::string why_failed(const std::atomic<int>& done) const;

  const Files files_;
  const size_t depth_;
  const int64_t piece_bytes_;
  const std::unique_ptr<ReadQueue> queue_;
  const std::string engine_note_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool taking_ = false;                  // a thread is in queue_->reap(), maybe without the lock
  std::vector<Completion> completions_;  // of that thread
  std::vector<Completion> refused_;
  std::vector<std::unique_ptr<Request>> requests_, spare_;
  std::deque<Piece*> pending_;
  int issued_ = 0;
  Drives drives_;
  std::vector<std::string> problems_;  // of each drive, the last
  std::map<const std::atomic<int>*, std::string> failures_;
  int64_t bytes_ = 0, reads_ = 0, failed_ = 0;
  double seconds_ = 0;
  Drives::Time since_{};
};

}  // namespace moestro
