// The streams of an accelerator that is emulated on the CPU: what is given to a stream runs later,
// on a thread of its own, in order; streams know of each other only through events. So what would
// be a race on a real accelerator is one here, and random delays between any two steps bring it to
// light.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/delays.h"
#include "core/program.h"

namespace moestro {

// A point of a stream that others wait for: the latest at which it was recorded.
class Event {
 public:
  // Which recording a wait from now on is for.
  uint64_t recorded() const;
  uint64_t next();                 // a recording, when it is put into its stream
  void reach(uint64_t recording);  // when its stream comes to it
  void wait(uint64_t recording) const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  uint64_t recorded_ = 0, reached_ = 0;
};

// What a step of a model gives to a stream, recorded once: ops of the CPU that stand for the
// accelerator's kernels and copies, and functions of the host.
class StreamProgram {
 public:
  using Function = void (*)(void*);

  // `program` must outlive this.
  void add_ops(Program& program) { steps_.push_back({.ops = &program}); }
  // always: called also when an earlier step has failed, for what must be waited for.
  void add_callback(Function function, void* user, bool always) {
    steps_.push_back({.function = function, .user = user, .always = always});
  }
  size_t size() const { return steps_.size(); }

 private:
  friend class Stream;
  struct Step {
    Program* ops = nullptr;
    Function function = nullptr;
    void* user = nullptr;
    bool always = false;
  };
  std::vector<Step> steps_;
};

class Stream {
 public:
  // delays: before each step.
  explicit Stream(Delays delays = Delays());
  ~Stream();  // when all is done
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // These return at once; `program` must live until it is done.
  void launch(const StreamProgram& program);
  void record(std::shared_ptr<Event> event);
  void wait(std::shared_ptr<Event> event);
  // Until all that was given is done. Throws what the first step that failed since the last call
  // has thrown; steps after it were left out.
  void synchronize();

 private:
  void give(std::function<void()> work);
  void work();
  void run(const StreamProgram& program);
  template <class F>
  void attempt(F&& f);

  Delays delays_;  // of the thread
  std::mutex mutex_;
  std::condition_variable given_, idle_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false, stopping_ = false;
  std::exception_ptr failure_;  // of the thread while busy
  std::thread thread_;          // last: it uses the others
};

}  // namespace moestro
