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

inline auto few_tokens(FormatKind kind) { return k_scalar.matrix.tiles[static_cast<int>(kind)]; }

#include "algo/tiles_amx.h"
}  // namespace
constinit const AmxKernels k_amx_emulated_kernels = make_amx_kernels<EmuTile>();
}  // namespace moestro
