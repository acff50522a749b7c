// Arguments that all attention ops share: cache tensors and the ragged batch.
#pragma once

#include "algo/kv_cache.h"
#include "bind/tensors.h"

namespace moestro {

using Cache = nb::ndarray<nb::c_contig, nb::device::cpu>;

inline bool is_bfloat16(const nb::dlpack::dtype& type) {
  return type.lanes == 1 && type.bits == 16 &&
         static_cast<nb::dlpack::dtype_code>(type.code) == nb::dlpack::dtype_code::Bfloat;
}

inline CacheType cache_type(const Cache& tensor) {
  const nb::dlpack::dtype type = tensor.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (type == nb::dtype<float>()) return CacheType::kF32;
  if (type == nb::dtype<uint8_t>()) return CacheType::kInt8;
  if (is_bfloat16(type)) return CacheType::kBf16;
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Float)
    return CacheType::kF16;
  throw Error(ErrorKind::kUnsupportedOp,
              "attention caches hold float32, float16 or bfloat16 numbers, or uint8 codes");
}

inline RaggedBatch ragged_batch(const std::string& op, const Ints1& positions, const Ints1& slots,
                                const Ints2& page_table, int64_t tokens) {
  require_size((op + ": positions").c_str(), positions.shape(0), tokens);
  require_size((op + ": slots").c_str(), slots.shape(0), tokens);
  return {.positions = positions.data(),
          .slots = slots.data(),
          .page_table = page_table.data(),
          .slot_count = static_cast<int64_t>(page_table.shape(0)),
          .pages_per_slot = static_cast<int64_t>(page_table.shape(1))};
}

}  // namespace moestro
