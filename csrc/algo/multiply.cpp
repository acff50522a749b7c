#include "algo/multiply.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "algo/activations.h"
#include "algo/tile_job.h"

namespace moestro {

void multiply_by(const IsaTable& table, const PackedMatrix& weight, const float* x, int64_t tokens,
                 float* out) {
  const MatrixKernels& kernels = table.matrix;
  const ActivationBuffer buffer(weight, tokens);
  Activations act = buffer.view();
  // The exact kernels, whatever same_bits() says.
  if (!layout_facts(weight.kind).is_float) act.x = nullptr;
  for (int64_t t = 0; t < tokens; ++t)
    kernels.quantize(x + t * weight.cols, static_cast<int>(weight.cols), act, t, 0);
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  const std::unique_ptr<Line[]> scratch(new Line[kTileScratchBytes / sizeof(Line)]);
  std::vector<float> result(size_t(tokens * 2 * kTileChannels));
  for (int64_t n = 0; n < weight.row_tiles(); n += 2) {
    const TileJob job = tile_job(weight, n, weight.row_tiles(), whole_run(weight), act, tokens,
                                 result.data(), scratch[0].bytes);
    kernels.tiles[static_cast<int>(weight.kind)](job);
    const int64_t width = job.tiles * kTileChannels, channel = n * kTileChannels;
    for (int64_t t = 0; t < tokens; ++t)
      std::copy_n(result.data() + t * width, std::min(width, weight.rows - channel),
                  out + t * weight.rows + channel);
  }
}

}  // namespace moestro
