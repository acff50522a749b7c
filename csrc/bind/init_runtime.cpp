// ISA choice, threads, programs, and the translation of native errors.
#include <utility>

#include "bind/tensors.h"
#include "core/memory.h"
#include "core/team.h"
#include "isa/dispatch.h"

namespace moestro {
namespace {

const char* python_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUnsupportedOp:
      return "UnsupportedOp";
    case ErrorKind::kUnsupportedFormat:
      return "UnsupportedFormat";
    case ErrorKind::kCheckpoint:
      return "CheckpointError";
    case ErrorKind::kStorage:
      return "StorageError";
    case ErrorKind::kInvalidRequest:
      break;
  }
  return "InvalidRequest";
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const nb::object type =
        nb::module_::import_("moestro.core.errors").attr(python_name(error.kind()));
    PyErr_SetString(type.ptr(), error.what());
  }
}

nb::ndarray<nb::numpy, uint8_t> allocate_bytes(int64_t nbytes) {
  require(nbytes > 0, "allocate_bytes: size must be positive");
  std::byte* p = allocate_pages(size_t(nbytes));
  if (p == nullptr) throw std::bad_alloc();
  struct Owned {
    std::byte* p;
    size_t nbytes;
  };
  nb::capsule owner(new Owned{p, size_t(nbytes)}, [](void* q) noexcept {
    const std::unique_ptr<Owned> owned(static_cast<Owned*>(q));
    free_pages(owned->p, owned->nbytes);
  });
  return nb::ndarray<nb::numpy, uint8_t>(p, {size_t(nbytes)}, owner);
}

std::vector<std::pair<int64_t, int64_t>> slices(int64_t steps) {
  std::vector<std::pair<int64_t, int64_t>> bounds;
  for (const Slice& slice : process_slices(steps)) bounds.emplace_back(slice.first, slice.end);
  return bounds;
}

}  // namespace

void init_runtime(nb::module_& m) {
  nb::register_exception_translator(translate);
  m.def("isa", [] { return std::string(isa().name); }, "Name of the active kernel table.");
  m.def("set_isa", &set_isa, nb::arg("name"));
  m.def("supported_isas", &supported_isas);
  m.def("built_isas", &built_isas);
  m.def("same_bits", &same_bits,
        "Whether integer formats give the same bits on every instruction set and for any batch.");
  m.def("set_same_bits", &set_same_bits, nb::arg("same"), "Takes effect for ops made afterwards.");
  m.def(
      "folds", [] { return isa().matrix.folds; },
      "Whether the active kernel table is faster without same_bits().");
  m.def("emulated_isas", &emulated_isas,
        "Models of instruction sets, for tests: they run anywhere, slowly, and only when set.");
  m.def("set_threads", &set_process_threads, nb::arg("threads"));
  m.def("threads", &process_threads);
  m.def(
      "set_team",
      [](std::vector<int> node, std::vector<std::vector<int>> cpus) {
        set_process_layout({std::move(node), std::move(cpus)});
      },
      nb::arg("node"), nb::arg("cpus"),
      "One entry per thread: its node, and the logical CPUs it is kept on (none: any).");
  m.def(
      "placement_problem", [] { return process_team()->placement_problem(); },
      "Why threads of the team are not kept on their CPUs; empty if they are.");
  m.def("node_slices", &slices, nb::arg("steps"),
        "What each node of the team computes of that many steps of output channels.");
  m.def("allocate_bytes", &allocate_bytes, nb::arg("nbytes"),
        "Zeroed uint8 memory aligned to 2 MiB, on huge pages where the system gives them.");
  m.def(
      "prefer_node",
      [](Bytes1 data, int64_t start, int64_t nbytes, int node) {
        require(start >= 0 && nbytes >= 0 && start + nbytes <= int64_t(data.shape(0)),
                "prefer_node: outside the buffer");
        return prefer_node(reinterpret_cast<std::byte*>(data.data()) + start, size_t(nbytes), node);
      },
      nb::arg("data").noconvert(), nb::arg("start"), nb::arg("nbytes"), nb::arg("node"),
      "Pages touched from now on come from this NUMA node (-1: as usual); 0 or an errno.");
  m.def(
      "node_of",
      [](Bytes1 data, int64_t at) {
        require(at >= 0 && at < int64_t(data.shape(0)), "node_of: outside the buffer");
        return node_of(reinterpret_cast<const std::byte*>(data.data()) + at);
      },
      nb::arg("data").noconvert(), nb::arg("at"),
      "NUMA node of the page that holds a byte, or minus an errno.");
  nb::class_<BoundProgram>(m, "Program", "Recorded ops over fixed buffers.")
      .def(nb::init<>())
      .def("__len__", [](const BoundProgram& p) { return p.program.size(); })
      .def("replay", [](BoundProgram& p) {
        nb::gil_scoped_release release;
        p.program.replay();
      });
}

}  // namespace moestro
