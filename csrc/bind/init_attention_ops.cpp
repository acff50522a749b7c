// Bindings of the paged cache and attention ops. No argument is converted (see init_float_ops.cpp).
#include "algo/attention.h"
#include "algo/kv_cache.h"
#include "bind/tensors.h"

namespace moestro {
namespace {

using Cache = nb::ndarray<nb::c_contig, nb::device::cpu>;

CacheType cache_type(const Cache& tensor) {
  const nb::dlpack::dtype type = tensor.dtype();
  if (type == nb::dtype<float>()) return CacheType::kF32;
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Float)
    return CacheType::kF16;
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Bfloat)
    return CacheType::kBf16;
  throw Error(ErrorKind::kUnsupportedOp,
              "attention caches hold float32, float16 or bfloat16 numbers");
}

PagedCache paged_cache(const std::string& op, const Cache& k, const Cache& v) {
  require(v.ndim() == 4, op + ": cache.v must be [pages, kv_heads, page_size, head_dim]");
  require(k.ndim() == 5, op + ": cache.k must be [pages, kv_heads, page_size / 16, head_dim, 16]");
  const PagedCache cache{.k = static_cast<std::byte*>(k.data()),
                         .v = static_cast<std::byte*>(v.data()),
                         .type = cache_type(v),
                         .pages = static_cast<int64_t>(v.shape(0)),
                         .kv_heads = static_cast<int64_t>(v.shape(1)),
                         .page_size = static_cast<int64_t>(v.shape(2)),
                         .head_dim = static_cast<int64_t>(v.shape(3))};
  require(k.dtype() == v.dtype(), op + ": cache.k and cache.v differ in dtype");
  require(cache.kv_heads >= 1, op + ": the cache has no kv heads");
  require(cache.page_size >= kKeyLanes && cache.page_size % kKeyLanes == 0,
          op + ": page_size " + std::to_string(cache.page_size) + " is not a multiple of 16");
  if (cache.head_dim < 1 || cache.head_dim > kMaxHeadDim)
    throw Error(ErrorKind::kUnsupportedOp, op + ": head_dim " + std::to_string(cache.head_dim) +
                                               " is outside 1.." + std::to_string(kMaxHeadDim));
  const int64_t wanted[] = {cache.pages, cache.kv_heads, cache.page_size / kKeyLanes,
                            cache.head_dim, kKeyLanes};
  for (size_t i = 0; i < 5; ++i)
    require(static_cast<int64_t>(k.shape(i)) == wanted[i],
            op + ": cache.k has size " + std::to_string(k.shape(i)) + " in dimension " +
                std::to_string(i) + ", expected " + std::to_string(wanted[i]));
  return cache;
}

RaggedBatch ragged_batch(const std::string& op, const Ints1& positions, const Ints1& slots,
                         const Ints2& page_table, int64_t tokens) {
  require_size((op + ": positions").c_str(), positions.shape(0), tokens);
  require_size((op + ": slots").c_str(), slots.shape(0), tokens);
  return {.positions = positions.data(),
          .slots = slots.data(),
          .page_table = page_table.data(),
          .slot_count = static_cast<int64_t>(page_table.shape(0)),
          .pages_per_slot = static_cast<int64_t>(page_table.shape(1))};
}

void write_kv(BoundProgram* program, Floats2 k, Floats2 v, Cache cache_k, Cache cache_v,
              Ints1 positions, Ints1 slots, Ints2 page_table, Ints1 rows) {
  const PagedCache cache = paged_cache("write_kv", cache_k, cache_v);
  for (const Floats2* x : {&k, &v}) {
    require_size("write_kv: rows", x->shape(0), k.shape(0));
    require_size("write_kv: width", x->shape(1), cache.kv_heads * cache.head_dim);
  }
  const WriteKvArgs args{
      .k = k.data(),
      .v = v.data(),
      .cache = cache,
      .batch = ragged_batch("write_kv", positions, slots, page_table, k.shape(0))};
  submit(program, make_write_kv(args, make_rows(rows, k.shape(0))), k, v, cache_k, cache_v,
         positions, slots, page_table, rows);
}

void attention(BoundProgram* program, Floats2 q, Cache cache_k, Cache cache_v, Floats2 out,
               Ints1 positions, Ints1 slots, Ints2 page_table, Ints1 rows, int64_t heads,
               float scale, int64_t window, std::optional<Floats1> sinks) {
  const PagedCache cache = paged_cache("attention", cache_k, cache_v);
  if (heads < 1 || heads % cache.kv_heads != 0)
    throw Error(ErrorKind::kUnsupportedOp, "attention: " + std::to_string(heads) +
                                               " heads do not share " +
                                               std::to_string(cache.kv_heads) + " kv heads");
  require_size("attention: q width", q.shape(1), heads * cache.head_dim);
  require_size("attention: out width", out.shape(1), heads * cache.head_dim);
  require_size("attention: out rows", out.shape(0), q.shape(0));
  require(window >= 0, "attention: window " + std::to_string(window) + " is negative");
  if (sinks) require_size("attention: sinks", sinks->shape(0), heads);
  const AttentionArgs args{
      .q = q.data(),
      .out = out.data(),
      .cache = cache,
      .batch = ragged_batch("attention", positions, slots, page_table, q.shape(0)),
      .sinks = sinks ? sinks->data() : nullptr,
      .heads = heads,
      .scale = scale,
      .window = window == 0 ? kNoWindow : std::min(window, kNoWindow)};
  submit(program, make_attention(args, make_rows(rows, q.shape(0))), q, cache_k, cache_v, out,
         positions, slots, page_table, rows, sinks);
}

auto exact(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace

void init_attention_ops(nb::module_& m) {
  m.def("write_kv", &write_kv, nb::arg("program").none(), exact("k"), exact("v"), exact("cache_k"),
        exact("cache_v"), exact("positions"), exact("slots"), exact("page_table"), exact("rows"));
  m.def("attention", &attention, nb::arg("program").none(), exact("q"), exact("cache_k"),
        exact("cache_v"), exact("out"), exact("positions"), exact("slots"), exact("page_table"),
        exact("rows"), nb::kw_only(), nb::arg("heads"), nb::arg("scale"), nb::arg("window") = 0,
        exact("sinks").none() = nb::none());
}

}  // namespace moestro
