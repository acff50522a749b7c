// Bindings of the paged cache and attention ops. No argument is converted (see init_float_ops.cpp).
#include <cmath>
#include <span>

#include "algo/attention.h"
#include "algo/kv_cache.h"
#include "bind/cache_tensors.h"

namespace moestro {
namespace {

using Scales = std::optional<Cache>;

// The tensors of a KvLayer (ops/contracts.py).
struct CacheTensors {
  const Cache& k;
  const Cache& v;
  const Scales& k_scale;
  const Scales& v_scale;
};

void require_shape(const std::string& name, const Cache& tensor, std::span<const int64_t> wanted) {
  require(tensor.ndim() == wanted.size(), name + " has " + std::to_string(tensor.ndim()) +
                                              " dimensions, expected " +
                                              std::to_string(wanted.size()));
  for (size_t i = 0; i < wanted.size(); ++i)
    require(static_cast<int64_t>(tensor.shape(i)) == wanted[i],
            name + " has size " + std::to_string(tensor.shape(i)) + " in dimension " +
                std::to_string(i) + ", expected " + std::to_string(wanted[i]));
}

uint16_t* scales(const std::string& name, const Scales& tensor, std::span<const int64_t> wanted) {
  require(tensor.has_value(), name + " is missing: a cache of codes has scales");
  require(is_bfloat16(tensor->dtype()), name + " is not bfloat16");
  require_shape(name, *tensor, wanted);
  return static_cast<uint16_t*>(tensor->data());
}

void check_sizes(const std::string& op, const PagedCache& cache) {
  require(cache.kv_heads >= 1, op + ": the cache has no kv heads");
  require(cache.page_size >= kKeyLanes && cache.page_size % kKeyLanes == 0,
          op + ": page_size " + std::to_string(cache.page_size) + " is not a multiple of 16");
  const std::string dim = op + ": head_dim " + std::to_string(cache.head_dim);
  if (cache.head_dim < 1 || cache.head_dim > kMaxHeadDim)
    throw Error(ErrorKind::kUnsupportedOp, dim + " is outside 1.." + std::to_string(kMaxHeadDim));
  if (cache.type == CacheType::kInt8 && cache.head_dim % 16 != 0)
    throw Error(ErrorKind::kUnsupportedOp,
                dim + " of an int8 cache is not a multiple of 16; use float16");
}

PagedCache paged_cache(const std::string& op, const CacheTensors& tensors) {
  const Cache &k = tensors.k, &v = tensors.v;
  const CacheType type = cache_type(v);
  const bool codes = type == CacheType::kInt8;
  require(v.ndim() == (codes ? 5 : 4),
          op + (codes ? ": cache.v must be [pages, kv_heads, page_size / 4, head_dim, 4]"
                      : ": cache.v must be [pages, kv_heads, page_size, head_dim]"));
  require(k.dtype() == v.dtype(), op + ": cache.k and cache.v differ in dtype");
  PagedCache cache{.k = static_cast<std::byte*>(k.data()),
                   .v = static_cast<std::byte*>(v.data()),
                   .k_scale = nullptr,
                   .v_scale = nullptr,
                   .type = type,
                   .pages = static_cast<int64_t>(v.shape(0)),
                   .kv_heads = static_cast<int64_t>(v.shape(1)),
                   .page_size = static_cast<int64_t>(v.shape(2)) * (codes ? 4 : 1),
                   .head_dim = static_cast<int64_t>(v.shape(3))};
  check_sizes(op, cache);
  const int64_t tiles = cache.page_size / kKeyLanes, pages = cache.pages, heads = cache.kv_heads;
  if (!codes) {
    const int64_t wanted[] = {pages, heads, tiles, cache.head_dim, kKeyLanes};
    require_shape(op + ": cache.k", k, wanted);
    return cache;
  }
  const int64_t groups = scale_groups(static_cast<int>(cache.head_dim));
  const int64_t keys[] = {pages, heads, tiles, cache.head_dim / 4, kKeyLanes, 4};
  const int64_t values[] = {pages, heads, cache.page_size / 4, cache.head_dim, 4};
  const int64_t key_scales[] = {pages, heads, tiles, groups, kKeyLanes};
  const int64_t value_scales[] = {pages, heads, cache.page_size};
  require_shape(op + ": cache.k", k, keys);
  require_shape(op + ": cache.v", v, values);
  cache.k_scale = scales(op + ": cache.k_scale", tensors.k_scale, key_scales);
  cache.v_scale = scales(op + ": cache.v_scale", tensors.v_scale, value_scales);
  return cache;
}

void write_kv(BoundProgram* program, Floats2 k, Floats2 v, Cache cache_k, Cache cache_v,
              Scales k_scale, Scales v_scale, Ints1 positions, Ints1 slots, Ints2 page_table,
              Ints1 rows) {
  const PagedCache cache = paged_cache("write_kv", {cache_k, cache_v, k_scale, v_scale});
  for (const Floats2* x : {&k, &v}) {
    require_size("write_kv: rows", x->shape(0), k.shape(0));
    require_size("write_kv: width", x->shape(1), cache.kv_heads * cache.head_dim);
  }
  const WriteKvArgs args{
      .k = k.data(),
      .v = v.data(),
      .cache = cache,
      .batch = ragged_batch("write_kv", positions, slots, page_table, k.shape(0))};
  submit(program, make_write_kv(args, make_rows(rows, k.shape(0))), k, v, cache_k, cache_v, k_scale,
         v_scale, positions, slots, page_table, rows);
}

void attention(BoundProgram* program, Floats2 q, Cache cache_k, Cache cache_v, Scales k_scale,
               Scales v_scale, Floats2 out, Ints1 positions, Ints1 slots, Ints2 page_table,
               Ints1 rows, int64_t heads, float scale, int64_t window, float softcap,
               std::optional<Floats1> sinks) {
  const PagedCache cache = paged_cache("attention", {cache_k, cache_v, k_scale, v_scale});
  if (heads < 1 || heads % cache.kv_heads != 0)
    throw Error(ErrorKind::kUnsupportedOp, "attention: " + std::to_string(heads) +
                                               " heads do not share " +
                                               std::to_string(cache.kv_heads) + " kv heads");
  require_size("attention: q width", q.shape(1), heads * cache.head_dim);
  require_size("attention: out width", out.shape(1), heads * cache.head_dim);
  require_size("attention: out rows", out.shape(0), q.shape(0));
  require(window >= 0, "attention: window " + std::to_string(window) + " is negative");
  require(softcap >= 0.0f && std::isfinite(softcap),
          "attention: softcap " + std::to_string(softcap) + " is not a finite number >= 0");
  if (sinks) require_size("attention: sinks", sinks->shape(0), heads);
  const AttentionArgs args{
      .q = q.data(),
      .out = out.data(),
      .cache = cache,
      .batch = ragged_batch("attention", positions, slots, page_table, q.shape(0)),
      .sinks = sinks ? sinks->data() : nullptr,
      .heads = heads,
      .scale = scale,
      .window = window == 0 ? kNoWindow : std::min(window, kNoWindow),
      .softcap = softcap};
  submit(program, make_attention(args, make_rows(rows, q.shape(0))), q, cache_k, cache_v, k_scale,
         v_scale, out, positions, slots, page_table, rows, sinks);
}

auto exact(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace

void init_attention_ops(nb::module_& m) {
  m.def("write_kv", &write_kv, nb::arg("program").none(), exact("k"), exact("v"), exact("cache_k"),
        exact("cache_v"), exact("k_scale").none(), exact("v_scale").none(), exact("positions"),
        exact("slots"), exact("page_table"), exact("rows"));
  m.def("attention", &attention, nb::arg("program").none(), exact("q"), exact("cache_k"),
        exact("cache_v"), exact("k_scale").none(), exact("v_scale").none(), exact("out"),
        exact("positions"), exact("slots"), exact("page_table"), exact("rows"), nb::kw_only(),
        nb::arg("heads"), nb::arg("scale"), nb::arg("window") = 0, nb::arg("softcap") = 0.0f,
        exact("sinks").none() = nb::none());
}

}  // namespace moestro
