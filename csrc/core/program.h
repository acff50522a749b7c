// Ops over fixed buffers, and their record/replay.
#pragma once

#include <memory>
#include <vector>

#include "core/team.h"

namespace moestro {

// One operation bound to its buffers. run() is called by every worker of the team and must end with
// all of its output visible to all workers (that is, with a barrier).
class Op {
 public:
  virtual ~Op() = default;
  virtual void run(Worker& worker) = 0;
};

inline void run_op(Op& op) {
  run_on_team([&](Worker& worker) { op.run(worker); });
}

// A recorded sequence of ops; replay() runs it as one job, so workers never leave their spin.
class Program {
 public:
  Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void add(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }
  size_t size() const { return ops_.size(); }
  void replay() {
    run_on_team([&](Worker& worker) {
      for (auto& op : ops_) op->run(worker);
    });
  }
  // The same as jobs of their own, with between() before each but the first.
  template <class F>
  void replay_apart(F&& between) {
    for (size_t i = 0; i < ops_.size(); ++i) {
      if (i > 0) between();
      run_op(*ops_[i]);
    }
  }

 private:
  std::vector<std::unique_ptr<Op>> ops_;
};

}  // namespace moestro
