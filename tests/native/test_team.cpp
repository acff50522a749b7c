// The thread team: tasks, barriers, failures, callers on several threads, changes of its size.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "core/program.h"
#include "core/team.h"

namespace moestro_test {
namespace {

using namespace moestro;

// Every task of two phases once, with the writes of the first visible in the second.
void run_phases(int64_t tasks) {
  std::vector<int64_t> first(static_cast<size_t>(tasks)), second(first);
  run_on_team([&](Worker& worker) {
    worker.for_tasks(tasks, [&](int64_t t) { first[size_t(t)] += t; });
    worker.for_tasks(tasks, [&](int64_t t) { second[size_t(t)] += first[size_t(tasks - 1 - t)]; });
  });
  for (int64_t t = 0; t < tasks; ++t)
    check(first[size_t(t)] == t && second[size_t(t)] == tasks - 1 - t,
          "a task was lost or repeated");
}

// Every step of every node once, whoever is slow, in ranges no longer than asked for.
void run_ranges(int64_t steps, int64_t most) {
  const size_t nodes = process_slices(1).size();
  std::vector<std::atomic<int>> seen(nodes * size_t(steps) + 1);
  std::atomic<bool> too_long{false};
  run_on_team([&](Worker& worker) {
    for (int round = 0; round < 6; ++round)
      worker.for_node_ranges(steps, most, [&](int64_t first, int64_t end) {
        if (end - first > std::max<int64_t>(most, 1)) too_long = true;
        if (worker.index() == round % worker.count()) std::this_thread::yield();
        for (int64_t i = first; i < end; ++i)
          ++seen[size_t(worker.node()) * size_t(steps) + size_t(i)];
      });
  });
  check(!too_long, "a range was longer than asked for");
  for (size_t i = 0; i < nodes * size_t(steps); ++i)
    check(seen[i] == 6, "a step was lost or repeated");
}

void fail_in_one_worker() {
  check_throws<Error>(
      [] {
        run_on_team([](Worker& worker) {
          worker.for_tasks(64, [](int64_t t) {
            if (t == 17) throw invalid_request("task seventeen");
          });
          worker.barrier();
        });
      },
      "task seventeen");
}

void nest() {
  check_throws<Error>([] { run_on_team([](Worker&) { run_on_team([](Worker&) {}); }); },
                      "from inside");
}

}  // namespace

void test_team() {
  for (const int threads : {1, 2, 3}) {
    set_process_threads(threads);
    for (int i = 0; i < 20; ++i) run_phases(1 + 7 * i);
    for (const int64_t steps : {0, 1, 2, 5, 64, 1001})
      for (const int64_t most : {int64_t{0}, int64_t{1}, int64_t{7}, steps})
        run_ranges(steps, most);
    fail_in_one_worker();
    run_phases(50);
    nest();
  }
  set_process_layout({{0, 0, 0, 1}, std::vector<std::vector<int>>(4)});
  run_ranges(1001, 1001);
  run_ranges(3, 1);
  std::vector<std::thread> callers;
  std::atomic<int> failures{0};
  for (int c = 0; c < 3; ++c)
    callers.emplace_back([c, &failures] {
      try {
        for (int i = 0; i < 15; ++i) {
          if (c == 0) set_process_threads(1 + i % 3);
          run_phases(30);
          if (i % 5 == c) fail_in_one_worker();
        }
      } catch (const std::exception&) {
        ++failures;
      }
    });
  for (auto& caller : callers) caller.join();
  check(failures == 0, "a job of several callers went wrong");
}

}  // namespace moestro_test
