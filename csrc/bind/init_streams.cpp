// Bindings of the emulated accelerator's streams, and of what the CPU computes beside any stream.
#include <cstdint>
#include <memory>
#include <utility>

#include "bind/tensors.h"
#include "emulated/stream.h"
#include "tiers/host_lane.h"

namespace moestro {
namespace {

uintptr_t address(void (*function)(void*)) { return reinterpret_cast<uintptr_t>(function); }

void add_callback(StreamProgram& program, uintptr_t function, uintptr_t user, bool always) {
  program.add_callback(reinterpret_cast<StreamProgram::Function>(function),
                       reinterpret_cast<void*>(user), always);
}

}  // namespace

void init_streams(nb::module_& m) {
  nb::class_<HostLane>(m, "HostLane", "A thread for what the CPU computes beside an accelerator.")
      .def(nb::new_([](uint32_t seed, int max_delay_us) {
             return std::make_shared<HostLane>(Delays(seed, max_delay_us));
           }),
           nb::arg("seed") = 0, nb::arg("max_delay_us") = 0)
      .def("check", &HostLane::check);
  nb::class_<HostWork>(m, "HostWork",
                       "A program of the CPU that a stream begins and waits for: functions by "
                       "address, which take `user`.")
      .def(
          "__init__",
          [](HostWork* self, std::shared_ptr<HostLane> lane, BoundProgram& program) {
            new (self) HostWork(std::move(lane), program.program);
          },
          nb::arg("lane"), nb::arg("program"), nb::keep_alive<1, 3>())
      .def_prop_ro("submit", [](const HostWork&) { return address(&HostWork::submit); })
      .def_prop_ro("wait", [](const HostWork&) { return address(&HostWork::wait); })
      .def_prop_ro("user", [](HostWork& work) { return reinterpret_cast<uintptr_t>(&work); });
  nb::class_<Event>(m, "Event", "A point of a stream that others wait for.").def(nb::new_([] {
    return std::make_shared<Event>();
  }));
  nb::class_<StreamProgram>(m, "StreamProgram", "What a stream of the emulated accelerator runs.")
      .def(nb::init<>())
      .def("__len__", &StreamProgram::size)
      .def(
          "add_ops",
          [](StreamProgram& self, BoundProgram& program) { self.add_ops(program.program); },
          nb::arg("program"), nb::keep_alive<1, 2>())
      .def("add_callback", &add_callback, nb::arg("function"), nb::arg("user"), nb::kw_only(),
           nb::arg("always") = false, "`function` and `user` by address.");
  nb::class_<Stream>(m, "Stream", "A stream of the emulated accelerator.")
      .def(
          "__init__",
          [](Stream* self, uint32_t seed, int max_delay_us) {
            new (self) Stream(Delays(seed, max_delay_us));
          },
          nb::arg("seed") = 0, nb::arg("max_delay_us") = 0,
          "Up to max_delay_us microseconds pass before each step, by a random sequence of seed.")
      .def("launch", &Stream::launch, nb::arg("program"))
      .def("record", &Stream::record, nb::arg("event"))
      .def("wait", &Stream::wait, nb::arg("event"))
      .def("synchronize", &Stream::synchronize, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace moestro
