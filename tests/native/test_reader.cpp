// The block reader: the bytes of a plain read, from several threads and mirrors, whatever the queue
// under it does; and errors, never bytes, of files that fail or change.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "stream/block_reader.h"
#include "stream/drives.h"

namespace moestro_test {
namespace {

using namespace moestro;

constexpr int64_t kBlock = BlockReader::kBlock;

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/moestro-reader-XXXXXX";
    check(mkdtemp(name) != nullptr, "no folder for files");
    path_ = name;
  }
  ~Folder() {
    for (const std::string& file : files_) unlink(file.c_str());
    rmdir(path_.c_str());
  }
  std::string write(const std::string& name, const std::vector<uint8_t>& content) {
    const std::string file = path_ + "/" + name;
    const int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    check(::write(fd, content.data(), content.size()) == ssize_t(content.size()), "cannot write");
    close(fd);
    files_.push_back(file);
    return file;
  }
  std::string path() const { return path_; }

 private:
  std::string path_;
  std::vector<std::string> files_;
};

struct Buffer {
  explicit Buffer(int64_t nbytes)
      : memory(static_cast<std::byte*>(std::aligned_alloc(size_t(kBlock), size_t(nbytes)))) {
    std::memset(memory.get(), 0xee, size_t(nbytes));
  }
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  bool holds(const std::vector<uint8_t>& content, int64_t offset, int64_t nbytes) const {
    return std::memcmp(memory.get(), content.data() + offset, size_t(nbytes)) == 0;
  }
  std::unique_ptr<std::byte, Free> memory;
};

// A queue that does as it likes: short reads, refusals and interruptions, in any order. `broken`
// file descriptors give EIO; what is `cut` gives nothing.
class UnrulyQueue final : public ReadQueue {
 public:
  UnrulyQueue(uint32_t seed, bool breaks) : random_(seed), breaks_(breaks) {}
  const char* name() const override { return "unruly"; }
  void issue(const QueuedRead& read) override {
    const std::lock_guard lock(mutex_);
    first_fd_ = first_fd_ < 0 ? read.fd : first_fd_;
    reads_.push_back(read);
  }
  void flush(std::vector<Completion>& refused) override {
    const std::lock_guard lock(mutex_);
    if (reads_.empty() || random_.bits() % 8 != 0) return;
    refused.push_back({reads_.back().tag, -EAGAIN});
    reads_.pop_back();
  }
  void reap(std::vector<Completion>& ended, bool) override {
    const std::lock_guard lock(mutex_);
    if (reads_.empty()) return;
    const size_t i = random_.bits() % reads_.size();
    const QueuedRead read = reads_[i];
    reads_.erase(reads_.begin() + int64_t(i));
    ended.push_back({read.tag, result(read)});
  }

 private:
  int64_t result(const QueuedRead& read) {
    if (breaks_ && read.fd == first_fd_) return -EIO;
    switch (random_.bits() % 5) {
      case 0:
        return -EINTR;
      case 1:
        return -ECANCELED;
    }
    const ssize_t got = pread(read.fd, read.to, size_t(read.bytes), read.offset);
    if (got < 0) return -errno;
    // Sometimes it is short, and not at a block.
    return random_.bits() % 4 == 0 ? 1 + int64_t(random_.bits()) % got : got;
  }
  std::mutex mutex_;
  Random random_;
  const bool breaks_;
  int first_fd_ = -1;
  std::vector<QueuedRead> reads_;
};

BlockReader::MakeQueue unruly(uint32_t seed, bool breaks) {
  return [=](int, int) { return std::make_unique<UnrulyQueue>(seed, breaks); };
}

// Random ranges of random files, several in flight.
void read_randomly(BlockReader& reader, const std::vector<std::vector<uint8_t>>& files,
                   uint32_t seed, int rounds) {
  constexpr int kSlots = 6;
  constexpr int64_t kMost = 40 * kBlock;
  struct Slot {
    Buffer buffer{kMost};
    std::atomic<int> done{1};
    size_t file = 0;
    int64_t offset = 0, bytes = 0;
  };
  std::vector<Slot> slots(kSlots);
  const struct Drain {
    ~Drain() {
      for (const Slot& slot : slots)
        while (slot.done == 0) reader.poll();
    }
    BlockReader& reader;
    const std::vector<Slot>& slots;
  } drain{reader, slots};
  Random random(seed);
  for (int i = 0; i < rounds + kSlots; ++i) {
    Slot& slot = slots[size_t(i) % kSlots];
    reader.wait(slot.done);
    check(slot.buffer.holds(files[slot.file], slot.offset, slot.bytes), "wrong bytes were read");
    if (i >= rounds) continue;
    slot.file = random.bits() % files.size();
    const int64_t blocks = int64_t(files[slot.file].size()) / kBlock;
    const int64_t length = 1 + random.bits() % std::min<int64_t>(blocks, kMost / kBlock);
    slot.offset = random.bits() % uint32_t(blocks - length + 1) * kBlock;
    slot.bytes = length * kBlock;
    std::memset(slot.buffer.memory.get(), 0xee, size_t(slot.bytes));
    slot.done = 0;
    reader.submit(int(slot.file), slot.offset, slot.bytes, slot.buffer.memory.get(), &slot.done);
    if (i % 3 == 0) reader.poll();
  }
}

void read_from_threads(BlockReader& reader, const std::vector<std::vector<uint8_t>>& files,
                       int rounds) {
  std::vector<std::string> failures(4);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      try {
        read_randomly(reader, files, t + 1, rounds);
      } catch (const std::exception& error) {
        failures[t] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) check(failure.empty(), failure);
}

void read_one(BlockReader& reader, int64_t offset, int64_t bytes, Buffer& buffer) {
  std::atomic<int> done{0};
  reader.submit(0, offset, bytes, buffer.memory.get(), &done);
  reader.wait(done);
}

void read_all_ways(Folder& folder) {
  std::vector<std::vector<uint8_t>> files;
  std::vector<std::vector<std::string>> one, two;
  for (uint32_t f = 0; f < 3; ++f) {
    files.push_back(bytes(kBlock * (50 + 30 * f), f + 1));
    one.push_back({folder.write("a" + std::to_string(f), files.back())});
    two.push_back({one.back().front(), folder.write("b" + std::to_string(f), files.back())});
  }
  using Engine = ReaderOptions::Engine;
  for (const Engine engine : {Engine::kPread, Engine::kAuto})
    for (const bool direct : {true, false}) {
      ReaderOptions options{.queue_depth = 5, .direct = direct, .engine = engine};
      options.piece_bytes = 7 * kBlock;
      BlockReader plain(one, options), mirrored(two, options);
      read_from_threads(plain, files, 30);
      read_from_threads(mirrored, files, 30);
      check(plain.stats().reads == 4 * 30 && plain.stats().failed == 0, "reads are miscounted");
      for (const MirrorStats& mirror : mirrored.stats().mirrors)
        check(mirror.bytes > 0 && mirror.problem.empty(), "a mirror was not read");
    }
  for (uint32_t seed = 0; seed < 4; ++seed) {
    BlockReader reader(one, {.queue_depth = 3, .piece_bytes = 3 * kBlock}, unruly(seed, false));
    read_from_threads(reader, files, 40);
  }
  BlockReader broken(two, {.queue_depth = 3, .piece_bytes = 3 * kBlock}, unruly(9, true));
  read_from_threads(broken, {files.front()}, 40);
  const ReaderStats stats = broken.stats();
  check(stats.failed == 0 && stats.mirrors[0].bytes == 0 &&
            stats.mirrors[0].problem.find("Input/output error") != std::string::npos,
        "a mirror that fails was not replaced");
}

void refuse(Folder& folder) {
  const auto content = bytes(kBlock * 8, 1);
  const std::string path = folder.write("refuse", content);
  Buffer buffer(kBlock * 8);
  std::atomic<int> done{0};
  const auto submit = [&](BlockReader& reader, int file, int64_t offset, int64_t nbytes,
                          std::byte* to) {
    return [=, &reader, &done] { reader.submit(file, offset, nbytes, to, &done); };
  };
  BlockReader reader({{path}}, {});
  std::byte* const to = buffer.memory.get();
  check_throws<Error>(submit(reader, 1, 0, kBlock, to), "no file 1");
  check_throws<Error>(submit(reader, 0, 1, kBlock, to), "whole blocks");
  check_throws<Error>(submit(reader, 0, 0, kBlock + 1, to), "whole blocks");
  check_throws<Error>(submit(reader, 0, 0, 0, to), "whole blocks");
  check_throws<Error>(submit(reader, 0, 0, kBlock, to + 8), "whole blocks");
  check_throws<Error>(submit(reader, 0, 7 * kBlock, 2 * kBlock, to), "the file has 32768 bytes");
  check_throws<Error>(submit(reader, 0, INT64_MAX / kBlock * kBlock, kBlock, to), "the file has");
  check(done == 0, "what was refused is reported");
  check_throws<Error>([&] { reader.wait(done); }, "nothing is being read");
  check_throws<Error>([&] { BlockReader none({{path + ".not"}}, {}); }, "No such file");
  check_throws<Error>([&] { BlockReader none({{folder.path()}}, {}); }, "Is a directory");
  check_throws<Error>([&] { BlockReader none({}, {}); }, "at least one file");
  check_throws<Error>([&] { BlockReader none({{path}, {path, path}}, {}); }, "as many copies");
  check_throws<Error>([&] { BlockReader none({{path}}, {.queue_depth = 0}); }, "queue_depth");
  auto other = content;
  other[7 * kBlock + 5] ^= 1;
  const std::string differs = folder.write("differs", other);
  check_throws<Error>([&] { BlockReader none({{path, differs}}, {}); }, "no copy of");
  other.resize(kBlock);
  const std::string shorter = folder.write("shorter", other);
  check_throws<Error>([&] { BlockReader none({{path, shorter}}, {}); }, "has 4096 bytes, but");
  read_one(reader, 4 * kBlock, 4 * kBlock, buffer);
  check(buffer.holds(content, 4 * kBlock, 4 * kBlock), "a refusal spoils what comes after");
}

void report_failures(Folder& folder) {
  const auto content = bytes(kBlock * 8, 1);
  Buffer buffer(kBlock * 8);
  for (const auto engine : {ReaderOptions::Engine::kPread, ReaderOptions::Engine::kAuto}) {
    const std::string path = folder.write("changes", content);
    ReaderOptions options{.engine = engine};
    BlockReader cut({{path}}, options), written({{path}}, options);
    read_one(written, 0, 8 * kBlock, buffer);
    check(truncate(path.c_str(), 4 * kBlock) == 0, "cannot truncate");
    const std::string wanted = path + ": wanted 8192 bytes at 24576, got 0";
    check_throws<Error>([&] { read_one(cut, 6 * kBlock, 2 * kBlock, buffer); }, wanted);
    check_throws<Error>([&] { read_one(cut, 0, kBlock, buffer); }, "from 32768 to 16384 bytes");
    check(truncate(path.c_str(), 8 * kBlock) == 0, "cannot extend");
    check_throws<Error>([&] { read_one(written, 0, kBlock, buffer); }, "has been written to");
    check(cut.stats().failed == 2 && cut.stats().reads == 0, "failures are miscounted");
    // A file that is put in its place by name does not matter: the one that was opened is read.
    const std::string stays = folder.write("stays", content);
    BlockReader replaced({{stays}}, options);
    const std::string fresh = folder.write("fresh", bytes(kBlock * 8, 2));
    check(rename(fresh.c_str(), stays.c_str()) == 0, "cannot rename");
    read_one(replaced, 0, 8 * kBlock, buffer);
    check(buffer.holds(content, 0, 8 * kBlock), "a file was read that was not opened");
  }
  const std::string path = folder.write("breaks", content);
  BlockReader breaks({{path}}, {}, unruly(1, true));
  check_throws<Error>([&] { read_one(breaks, kBlock, kBlock, buffer); },
                      "wanted 4096 bytes at 4096, got 0: Input/output error (errno 5)");
}

// A child reads with a queue of its own, and is told of what was lost.
[[maybe_unused]] void read_after_fork(Folder& folder) {
  const auto content = bytes(kBlock * 64, 3);
  const std::string path = folder.write("fork", content);
  for (const auto engine : {ReaderOptions::Engine::kPread, ReaderOptions::Engine::kAuto}) {
    BlockReader reader({{path}}, {.engine = engine});
    Buffer buffer(kBlock * 64), other(kBlock * 64);
    std::atomic<int> done{0};
    reader.submit(0, 0, kBlock * 64, buffer.memory.get(), &done);
    const pid_t child = fork();
    if (child == 0) {
      int status = 1;
      try {
        read_one(reader, kBlock, 63 * kBlock, other);
        status = other.holds(content, kBlock, 63 * kBlock) ? 0 : 2;
        if (done == 0) check_throws<Error>([&] { reader.wait(done); }, "fork");
      } catch (const std::exception&) {
        status = 3;
      }
      _exit(status);
    }
    int status = -1;
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child cannot read");
    reader.wait(done);
    read_one(reader, 0, 64 * kBlock, other);
    check(buffer.holds(content, 0, 64 * kBlock) && other.holds(content, 0, 64 * kBlock),
          "a fork spoils the parent's reads");
  }
}

// Two drives, one three times as fast: both end together, so the fast one reads three of four.
void share_between_drives() {
  using Clock = std::chrono::steady_clock;
  for (const int depth : {1, 4, 16}) {
    Drives drives(2);
    const double rate[] = {1e9, 3e9};
    constexpr int64_t kPiece = 1 << 20;
    struct Flying {
      int drive;
      double end;
    };
    double free_at[] = {0, 0}, time = 0;
    std::vector<Flying> flying;
    const auto at = [](double t) {
      return Clock::time_point() + std::chrono::nanoseconds(int64_t(t * 1e9));
    };
    for (int i = 0; i < 4000; ++i) {
      if (int(flying.size()) == depth) {
        const auto first = std::min_element(flying.begin(), flying.end(),
                                            [](auto& a, auto& b) { return a.end < b.end; });
        time = first->end;
        drives.end(first->drive, kPiece, kPiece, at(time));
        flying.erase(first);
      }
      const int d = drives.choose(3, kPiece);
      drives.begin(d, kPiece, at(time));
      free_at[d] = std::max(free_at[d], time) + double(kPiece) / rate[d];
      flying.push_back({d, free_at[d]});
    }
    const double share = double(drives[1].bytes) / double(drives[0].bytes + drives[1].bytes);
    // One at a time the fast one is best alone, but for looks at the other.
    check(depth == 1 ? share > 0.95 && share < 1 : share > 0.70 && share < 0.82,
          "at depth " + std::to_string(depth) + " the fast drive reads " + std::to_string(share));
    check(drives.choose(1, kPiece) == 0 && drives.choose(2, kPiece) == 1, "a drive ruled out");
  }
}

}  // namespace

void test_reader() {
  Folder folder;
  share_between_drives();
  read_all_ways(folder);
  refuse(folder);
  report_failures(folder);
#ifndef __SANITIZE_THREAD__  // it takes no new threads in the child of a process that has some
  read_after_fork(folder);
#endif
}

}  // namespace moestro_test
