#include "algo/gather.h"

#include <cstring>

#include "algo/checks.h"

namespace moestro {
namespace {

class Gather final : public Op {
 public:
  Gather(const GatherArgs& args, Rows rows) : a_(args), rows_(rows) {}

  void run(Worker& worker) override {
    const int64_t rows = rows_.get();
    require_indices("gather_rows: index", a_.indices, rows, a_.source_rows);
    worker.for_tasks(rows, [&](int64_t i) {
      std::memcpy(a_.out + i * a_.width, a_.x + a_.indices[i] * a_.width,
                  static_cast<size_t>(a_.width) * sizeof(float));
    });
  }

 private:
  GatherArgs a_;
  Rows rows_;
};

}  // namespace

std::unique_ptr<Op> make_gather(const GatherArgs& args, Rows rows) {
  return std::make_unique<Gather>(args, rows);
}

}  // namespace moestro
