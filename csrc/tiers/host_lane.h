// What the CPU computes inside a step of an accelerator. The step's stream calls two functions at
// the right places: one begins the work, on a thread that is kept for it, the other waits for it.
// They are plain functions of one pointer, as runtimes of accelerators call them from their
// streams, so a recorded step runs through without anything else.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "core/delays.h"
#include "core/program.h"

namespace moestro {

class HostWork;

// A thread that runs work in the order in which it is begun.
class HostLane {
 public:
  // delays: before each work.
  explicit HostLane(Delays delays = Delays());
  ~HostLane();  // when all work is done
  HostLane(const HostLane&) = delete;
  HostLane& operator=(const HostLane&) = delete;

  // Throws what the first work that failed since the last call has thrown.
  void check();

 private:
  friend class HostWork;
  void work();

  std::mutex mutex_;
  std::condition_variable begun_, done_;
  std::deque<HostWork*> queue_;
  std::exception_ptr failure_;
  bool stopping_ = false;
  Delays delays_;       // of the thread
  std::thread thread_;  // last: it uses the others
};

// One program on a lane, in flight at most once at a time.
class HostWork {
 public:
  // `program` must outlive this.
  HostWork(std::shared_ptr<HostLane> lane, Program& program);
  ~HostWork() { wait(this); }
  HostWork(const HostWork&) = delete;
  HostWork& operator=(const HostWork&) = delete;

  // `work` is the HostWork. Begun again, it first waits for the time before.
  static void submit(void* work) noexcept;
  // Until its writes are visible, whether or not it failed; at once if it was not begun.
  static void wait(void* work) noexcept;

 private:
  friend class HostLane;
  const std::shared_ptr<HostLane> lane_;
  Program& program_;
  bool in_flight_ = false;
};

}  // namespace moestro
