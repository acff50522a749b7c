// The paged key/value cache and the ragged batch that indexes it: their checks, and the op that
// stores a step's keys and values.
#pragma once

#include <memory>

#include "algo/rows.h"
#include "core/program.h"
#include "isa/attention_kernels.h"

namespace moestro {

// How a cache is cut into pages.
struct Paging {
  int64_t pages;
  int64_t page_size;
};

// One layer's cache. Numbers: k [pages, kv_heads, page_size / 16, head_dim, 16], v [pages,
// kv_heads, page_size, head_dim]. Bytes: k [pages, kv_heads, page_size / 16, head_dim / 4, 16, 4],
// v [pages, kv_heads, page_size / 4, head_dim, 4], with k_scale [pages, kv_heads, page_size / 16,
// scale_groups, 16] and v_scale [pages, kv_heads, page_size].
struct PagedCache {
  std::byte* k;
  std::byte* v;
  uint16_t* k_scale;  // null unless kInt8
  uint16_t* v_scale;
  CacheType type;
  int64_t pages;
  int64_t kv_heads;
  int64_t page_size;
  int64_t head_dim;

  operator Paging() const { return {pages, page_size}; }
  KvHead head(int64_t index, const int32_t* pages_of_slot) const {
    const int64_t bytes = page_size * head_dim * cache_element_size(type);
    const int64_t scales = page_size * scale_groups(static_cast<int>(head_dim));
    const bool scaled = type == CacheType::kInt8;
    return {.k = k + index * bytes,
            .v = v + index * bytes,
            .k_scale = scaled ? k_scale + index * scales : nullptr,
            .v_scale = scaled ? v_scale + index * page_size : nullptr,
            .page_bytes = kv_heads * bytes,
            .k_scale_page = kv_heads * scales,
            .v_scale_page = kv_heads * page_size,
            .pages = pages_of_slot,
            .page_size = page_size,
            .head_dim = static_cast<int>(head_dim),
            .type = type};
  }
};

// Where the tokens of a step belong.
struct RaggedBatch {
  const int32_t* positions;   // [T]
  const int32_t* slots;       // [T]
  const int32_t* page_table;  // [slots, pages_per_slot]
  int64_t slot_count;
  int64_t pages_per_slot;

  const int32_t* pages_of(int64_t token) const {
    return page_table + slots[token] * pages_per_slot;
  }
};

// Tokens first..end-1 of a batch, all of one sequence.
struct Run {
  int64_t first;
  int64_t end;
};

// The run that starts at token `first` of `rows`. Throws InvalidRequest if its slot lies outside
// the page table or its positions outside the slot's pages, or do not ascend by one.
Run next_run(const char* op, Paging cache, const RaggedBatch& batch, int64_t first, int64_t rows);
// Throws InvalidRequest if a page of positions first..last of the token's slot is not in the cache.
void require_pages(const char* op, Paging cache, const RaggedBatch& batch, int64_t token,
                   int64_t first, int64_t last);
// Both of all rows, for an op that writes their positions.
void require_writable(const char* op, Paging cache, const RaggedBatch& batch, int64_t rows);

struct WriteKvArgs {
  const float* k;  // [T, kv_heads * head_dim]
  const float* v;
  PagedCache cache;
  RaggedBatch batch;
};

std::unique_ptr<Op> make_write_kv(const WriteKvArgs& args, Rows rows);

}  // namespace moestro
