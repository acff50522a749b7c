// Streams of the emulated accelerator and the CPU's work beside them: order, hand-over, failures.
#include <memory>
#include <vector>

#include "algo/expert_slots.h"
#include "check.h"
#include "core/error.h"
#include "emulated/stream.h"
#include "tiers/host_lane.h"

namespace moestro_test {
namespace {

using namespace moestro;

constexpr int64_t kWidth = 64;

struct Buffer {
  std::vector<float> values = std::vector<float>(size_t(kWidth), 0.0f);
  std::byte* data() { return reinterpret_cast<std::byte*>(values.data()); }
};

std::unique_ptr<Op> copy(Buffer& from, Buffer& to, const int32_t* rows) {
  return make_copy_rows({from.data(), to.data(), kWidth * 4}, Rows(rows, 1));
}

// x -> (pinned) -> the CPU -> (pinned) -> y, while the stream copies something else.
void cross_and_come_back() {
  int32_t one = 1, host_rows = 1;
  Buffer x, there, back, y, other;
  const auto lane = std::make_shared<HostLane>(Delays(3, 100));
  Program host, before, beside, after;
  host.add(copy(there, back, &host_rows));
  HostWork work(lane, host);
  before.add(copy(x, there, &one));
  beside.add(copy(x, other, &one));
  after.add(copy(back, y, &one));
  after.add(copy(y, x, &one));
  StreamProgram step;
  step.add_ops(before);
  step.add_callback(&HostWork::submit, &work, false);
  step.add_ops(beside);
  step.add_callback(&HostWork::wait, &work, true);
  step.add_ops(after);
  Stream stream(Delays(1, 50));
  for (int i = 0; i < 100; ++i) {
    x.values.assign(x.values.size(), float(i));
    stream.launch(step);
    stream.launch(step);
    stream.synchronize();
    check(y.values == x.values && y.values.back() == float(i), "what crossed came back otherwise");
  }
  host_rows = 5;
  stream.launch(step);
  stream.synchronize();
  check_throws<Error>([&] { lane->check(); }, "row count 5");
  lane->check();
  host_rows = 1;
  one = -1;
  stream.launch(step);
  check_throws<Error>([&] { stream.synchronize(); }, "row count -1");
  stream.synchronize();
}

void streams_meet_at_events() {
  const int32_t one = 1;
  Buffer x, middle, y;
  Program first, second;
  first.add(copy(x, middle, &one));
  second.add(copy(middle, y, &one));
  StreamProgram write, read;
  write.add_ops(first);
  read.add_ops(second);
  Stream slow(Delays(7, 200)), fast;
  const auto written = std::make_shared<Event>(), was_read = std::make_shared<Event>();
  for (int i = 0; i < 100; ++i) {
    slow.wait(was_read);
    slow.synchronize();
    x.values.assign(x.values.size(), float(i));
    slow.launch(write);
    slow.record(written);
    fast.wait(written);
    fast.launch(read);
    fast.record(was_read);
    if (i % 10 != 9) continue;
    fast.synchronize();
    check(y.values == x.values, "a stream did not wait for an event");
  }
}

}  // namespace

void test_streams() {
  for (int threads : {1, 3}) {
    set_process_threads(threads);
    cross_and_come_back();
    streams_meet_at_events();
  }
  // Nothing is lost when all of it ends while there is work.
  const int32_t one = 1;
  Buffer x, y;
  x.values.assign(x.values.size(), 1.0f);
  Program program;
  program.add(copy(x, y, &one));
  StreamProgram step;
  step.add_ops(program);
  {
    Stream stream(Delays(2, 300));
    for (int i = 0; i < 5; ++i) stream.launch(step);
  }
  check(y.values == x.values, "a stream ended before its work");
}

}  // namespace moestro_test
