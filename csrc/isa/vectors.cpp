// Which vector width the active kernel table has.
#include "isa/vector_table.h"

#include <string_view>

#include "isa/dispatch.h"

namespace moestro {

const VectorTable& vectors() {
#if defined(__x86_64__) && !defined(MOESTRO_SCALAR_ONLY)
  // All other tables stand on AVX-512; the model of the tile registers runs anywhere.
  const std::string_view name = isa().name;
  if (name == "avx2" || name == "avx_vnni") return k_vectors_avx2;
  if (name.starts_with("avx512") || name == "amx") return k_vectors_avx512;
#endif
  return k_vectors_scalar;
}

}  // namespace moestro
