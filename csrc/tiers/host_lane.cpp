#include "tiers/host_lane.h"

#include <pthread.h>

#include <utility>

namespace moestro {

HostLane::HostLane(Delays delays) : delays_(delays), thread_([this] { work(); }) {
  pthread_setname_np(thread_.native_handle(), "moestro-lane");
}

HostLane::~HostLane() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  begun_.notify_all();
  thread_.join();
}

void HostLane::check() {
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure) std::rethrow_exception(std::move(failure));
}

void HostLane::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    begun_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    HostWork* const next = queue_.front();
    queue_.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    delays_.pause();
    try {
      next->program_.replay();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure && !failure_) failure_ = std::move(failure);
    next->in_flight_ = false;
    done_.notify_all();
  }
}

HostWork::HostWork(std::shared_ptr<HostLane> lane, Program& program)
    : lane_(std::move(lane)), program_(program) {}

void HostWork::submit(void* work) noexcept {
  auto& self = *static_cast<HostWork*>(work);
  HostLane& lane = *self.lane_;
  {
    std::unique_lock lock(lane.mutex_);
    lane.done_.wait(lock, [&] { return !self.in_flight_; });
    self.in_flight_ = true;
    lane.queue_.push_back(&self);
  }
  lane.begun_.notify_one();
}

void HostWork::wait(void* work) noexcept {
  auto& self = *static_cast<HostWork*>(work);
  std::unique_lock lock(self.lane_->mutex_);
  self.lane_->done_.wait(lock, [&] { return !self.in_flight_; });
}

}  // namespace moestro
