// Bindings of multi-head latent attention.
#include "algo/latent_attention.h"
#include "bind/cache_tensors.h"

namespace moestro {
namespace {

PagedLatent paged_latent(const std::string& op, const Cache& tensor, int64_t rank) {
  require(tensor.ndim() == 3, op + ": cache must be [pages, page_size, rank + rope]");
  const PagedLatent cache{.data = static_cast<std::byte*>(tensor.data()),
                          .type = cache_type(tensor),
                          .pages = static_cast<int64_t>(tensor.shape(0)),
                          .page_size = static_cast<int64_t>(tensor.shape(1)),
                          .width = static_cast<int64_t>(tensor.shape(2)),
                          .rank = rank};
  if (cache.type == CacheType::kInt8)
    throw Error(ErrorKind::kUnsupportedOp,
                op + ": caches of compressed rows hold float32, float16 or bfloat16 numbers");
  require(cache.page_size >= kKeyLanes && cache.page_size % kKeyLanes == 0,
          op + ": page_size " + std::to_string(cache.page_size) + " is not a multiple of 16");
  const auto require_range = [&](const char* what, int64_t n, int64_t most) {
    if (n < 1 || n > most)
      throw Error(ErrorKind::kUnsupportedOp, op + ": " + what + " " + std::to_string(n) +
                                                 " is outside 1.." + std::to_string(most));
  };
  require_range("rank", rank, kMaxLatentRank);
  require_range("rope channels", cache.width - rank, kMaxLatentRope);
  return cache;
}

void write_latent(BoundProgram* program, Floats2 kv, Floats1 norm, Floats2 cos, Floats2 sin,
                  Cache tensor, Ints1 positions, Ints1 slots, Ints2 page_table, Ints1 rows,
                  float eps, bool interleaved) {
  const PagedLatent cache =
      paged_latent("write_latent", tensor, static_cast<int64_t>(norm.shape(0)));
  require_size("write_latent: kv width", kv.shape(1), cache.width);
  require_size("write_latent: rope channels", cache.width - cache.rank, 2 * cos.shape(1));
  require_size("write_latent: sin positions", sin.shape(0), cos.shape(0));
  require_size("write_latent: sin width", sin.shape(1), cos.shape(1));
  const WriteLatentArgs args{
      .kv = kv.data(),
      .norm = norm.data(),
      .cos = cos.data(),
      .sin = sin.data(),
      .max_positions = static_cast<int64_t>(cos.shape(0)),
      .cache = cache,
      .batch = ragged_batch("write_latent", positions, slots, page_table, kv.shape(0)),
      .eps = eps,
      .interleaved = interleaved};
  submit(program, make_write_latent(args, make_rows(rows, kv.shape(0))), kv, norm, cos, sin, tensor,
         positions, slots, page_table, rows);
}

void latent_attention(BoundProgram* program, Floats2 q, Floats2 absorbed, Cache tensor, Floats2 out,
                      Ints1 positions, Ints1 slots, Ints2 page_table, Ints1 rows, int64_t heads,
                      int64_t rank, float scale) {
  const PagedLatent cache = paged_latent("latent_attention", tensor, rank);
  require(heads >= 1 && q.shape(1) % heads == 0, "latent_attention: " + std::to_string(heads) +
                                                     " heads do not divide q width " +
                                                     std::to_string(q.shape(1)));
  const int64_t q_width = static_cast<int64_t>(q.shape(1)) / heads, rope = cache.width - rank;
  require(q_width >= rope, "latent_attention: q has " + std::to_string(q_width) +
                               " channels per head, expected at least " + std::to_string(rope));
  require_size("latent_attention: absorbed width", absorbed.shape(1), heads * rank);
  require_size("latent_attention: absorbed rows", absorbed.shape(0), q.shape(0));
  require_size("latent_attention: out width", out.shape(1), heads * rank);
  require_size("latent_attention: out rows", out.shape(0), q.shape(0));
  const LatentAttentionArgs args{
      .q = q.data(),
      .absorbed = absorbed.data(),
      .out = out.data(),
      .cache = cache,
      .batch = ragged_batch("latent_attention", positions, slots, page_table, q.shape(0)),
      .heads = heads,
      .q_width = q_width,
      .scale = scale};
  submit(program, make_latent_attention(args, make_rows(rows, q.shape(0))), q, absorbed, tensor,
         out, positions, slots, page_table, rows);
}

auto exact(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace

void init_latent_ops(nb::module_& m) {
  m.def("write_latent", &write_latent, nb::arg("program").none(), exact("kv"), exact("norm"),
        exact("cos"), exact("sin"), exact("cache"), exact("positions"), exact("slots"),
        exact("page_table"), exact("rows"), nb::kw_only(), nb::arg("eps"), nb::arg("interleaved"));
  m.def("latent_attention", &latent_attention, nb::arg("program").none(), exact("q"),
        exact("absorbed"), exact("cache"), exact("out"), exact("positions"), exact("slots"),
        exact("page_table"), exact("rows"), nb::kw_only(), nb::arg("heads"), nb::arg("rank"),
        nb::arg("scale"));
}

}  // namespace moestro
