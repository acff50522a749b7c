#include "algo/kv_cache.h"

#include <algorithm>
#include <string>

#include "isa/dispatch.h"

namespace moestro {
namespace {

// Tokens of a task: whole K tiles mostly, so that two workers seldom share a cache line.
constexpr int64_t kTaskTokens = 64;

class WriteKv final : public Op {
 public:
  WriteKv(const WriteKvArgs& args, Rows rows) : a_(args), rows_(rows) {}

  void run(Worker& worker) override {
    const int64_t rows = rows_.get();
    require_writable("write_kv", a_.cache, a_.batch, rows);
    const AttentionKernels& kernels = isa().attention;
    const int64_t chunks = (rows + kTaskTokens - 1) / kTaskTokens;
    const int64_t heads = a_.cache.kv_heads, dim = a_.cache.head_dim;
    worker.for_tasks(chunks * heads, [&](int64_t task) {
      const int64_t h = task % heads, first = task / heads * kTaskTokens;
      for (int64_t t = first; t < std::min(rows, first + kTaskTokens); ++t) {
        const int64_t at = (t * heads + h) * dim;
        kernels.store(a_.cache.head(h, a_.batch.pages_of(t)), a_.batch.positions[t], a_.k + at,
                      a_.v + at);
      }
    });
  }

 private:
  WriteKvArgs a_;
  Rows rows_;
};

[[noreturn]] void refuse(const char* op, const char* what, int64_t value, int64_t token,
                         const std::string& wanted) {
  throw invalid_request(std::string(op) + ": " + what + " " + std::to_string(value) + " of row " +
                        std::to_string(token) + " " + wanted);
}

std::string outside(int64_t limit) { return "is outside 0.." + std::to_string(limit - 1); }

}  // namespace

Run next_run(const char* op, Paging cache, const RaggedBatch& batch, int64_t first, int64_t rows) {
  const int64_t slot = batch.slots[first], limit = batch.pages_per_slot * cache.page_size;
  if (slot < 0 || slot >= batch.slot_count)
    refuse(op, "slot", slot, first, outside(batch.slot_count));
  int64_t t = first;
  for (; t < rows && batch.slots[t] == slot; ++t) {
    const int64_t position = batch.positions[t];
    if (position < 0 || position >= limit) refuse(op, "position", position, t, outside(limit));
    if (t > first && position != batch.positions[t - 1] + 1)
      refuse(op, "position", position, t,
             "does not follow position " + std::to_string(batch.positions[t - 1]) +
                 " of the row before it in the same slot");
  }
  return {first, t};
}

void require_pages(const char* op, Paging cache, const RaggedBatch& batch, int64_t token,
                   int64_t first, int64_t last) {
  const int32_t* pages = batch.pages_of(token);
  for (int64_t p = first / cache.page_size; p <= last / cache.page_size; ++p)
    if (pages[p] < 0 || pages[p] >= cache.pages)
      refuse(op, "page", pages[p], token, outside(cache.pages));
}

// Every worker does it before any of them writes.
void require_writable(const char* op, Paging cache, const RaggedBatch& batch, int64_t rows) {
  for (int64_t t = 0; t < rows;) {
    const Run run = next_run(op, cache, batch, t, rows);
    const int64_t first = batch.positions[run.first], last = batch.positions[run.end - 1];
    require_pages(op, cache, batch, t, first, last);
    t = run.end;
  }
}

std::unique_ptr<Op> make_write_kv(const WriteKvArgs& args, Rows rows) {
  return std::make_unique<WriteKv>(args, rows);
}

}  // namespace moestro
