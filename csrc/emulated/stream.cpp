#include "emulated/stream.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace moestro {

uint64_t Event::recorded() const {
  const std::lock_guard lock(mutex_);
  return recorded_;
}

uint64_t Event::next() {
  const std::lock_guard lock(mutex_);
  return ++recorded_;
}

void Event::reach(uint64_t recording) {
  {
    const std::lock_guard lock(mutex_);
    reached_ = std::max(reached_, recording);
  }
  changed_.notify_all();
}

void Event::wait(uint64_t recording) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_ >= recording; });
}

Stream::Stream(Delays delays) : delays_(delays), thread_([this] { work(); }) {
  pthread_setname_np(thread_.native_handle(), "moestro-stream");
}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  given_.notify_all();
  thread_.join();
}

void Stream::give(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  given_.notify_one();
}

void Stream::launch(const StreamProgram& program) {
  give([this, &program] { run(program); });
}

void Stream::record(std::shared_ptr<Event> event) {
  give([event, recording = event->next()] { event->reach(recording); });
}

void Stream::wait(std::shared_ptr<Event> event) {
  give([event, recording = event->recorded()] { event->wait(recording); });
}

void Stream::synchronize() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Stream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    given_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::function<void()> next = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    delays_.pause();
    next();
    lock.lock();
    busy_ = false;
    if (queue_.empty()) idle_.notify_all();
  }
}

template <class F>
void Stream::attempt(F&& f) {
  try {
    f();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void Stream::run(const StreamProgram& program) {
  for (const StreamProgram::Step& step : program.steps_) {
    delays_.pause();
    if (step.ops == nullptr) {
      if (!failure_ || step.always) step.function(step.user);
    } else if (!failure_) {
      attempt([&] {
        if (!delays_.any()) return step.ops->replay();
        step.ops->replay_apart([this] { delays_.pause(); });
      });
    }
  }
}

}  // namespace moestro
