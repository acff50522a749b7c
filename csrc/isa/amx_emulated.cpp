// The AMX kernels over the model of the tile registers, on top of the reference table: for tests,
// on any machine. Everything but the tile instructions themselves is the code that AMX machines
// run.
#include <cmath>
#include <string>

#include "core/error.h"
#include "isa/amx_kernels.h"
#include "isa/prelude.h"

namespace moestro {
namespace {
#include "simd/scalar.h"
//
#include "micro/amx_tile.h"
//
#include "micro/amx_tile_emulated.h"
//
#include "algo/decode.h"
#include "algo/math.h"
//
#include "algo/activation_kernels.h"

inline auto few_tokens(FormatKind kind) { return k_scalar.matrix.tiles[static_cast<int>(kind)]; }

// Activations of the formats that are multiplied in bfloat16 pairs, rounded as vcvtneps2bf16 does.
inline uint16_t* pair_row(const Activations& act, int64_t row) {
  return reinterpret_cast<uint16_t*>(act.x + row * act.blocks * kBlockChannels);
}
struct ModelRows {
  static void store(const Activations& act, int64_t row, int64_t first, F32 a, F32 b) {
    const LayoutFacts& facts = layout_facts(act.kind);
    if (facts.is_float && !facts.pairs) return FloatRows::store(act, row, first, a, b);
    uint16_t* x = pair_row(act, row) + first;
    for (int i = 0; i < 16; ++i) {
      x[i] = f32_to_bf16(flush_denormal(a.v[i]));
      x[16 + i] = f32_to_bf16(flush_denormal(b.v[i]));
    }
  }
};

inline void store_pairs(uint8_t* p, F32 even, F32 odd) {
  for (int c = 0; c < kTileChannels; ++c) {
    const uint16_t pair[] = {f32_to_bf16(flush_denormal(even.v[c])),
                             f32_to_bf16(flush_denormal(odd.v[c]))};
    std::memcpy(p + 4 * c, pair, 4);
  }
}

inline void decode_pairs(Fp8Layout, const uint8_t* block, uint8_t* panel) {
  for (int k = 0; k < kBlockChannels; ++k)
    for (int c = 0; c < kTileChannels; ++c) {
      const uint16_t value = f32_to_bf16(e4m3_to_f32(block[k * kTileChannels + c]));
      std::memcpy(panel + k / 2 * 64 + c * 4 + k % 2 * 2, &value, 2);
    }
}

#include "algo/make_amx_kernels.h"

constexpr AmxKernels make_model_kernels() {
  AmxKernels kernels = make_amx_kernels<EmuTile>();
  kernels.quantize = quantize_row<ModelRows>;
#define MOESTRO_ACTIVATION(kind, name, gate) \
  kernels.gate_quantize[int(Activation::kind)] = gate_quantize_rows<gate, ModelRows>;
#include "isa/activation.def"
#undef MOESTRO_ACTIVATION
  return kernels;
}
}  // namespace
constinit const AmxKernels k_amx_emulated_kernels = make_model_kernels();
}  // namespace moestro
