// Integer tile products over fixed random bytes, as text: one line per format, tiles and tokens
// with the bits of the results. Built twice by test_isa_objects.py, over the scalar lanes and, with
// EMULATED, over AVX2 lanes and micro/dot_avx_vnni.h with vpdpbusd written out: what a machine
// without AVX-VNNI can prove of that table.
#include <cstdio>
#include <random>
#include <vector>

#include "isa/prelude.h"

namespace moestro {
namespace {
#ifdef EMULATED
// What Intel's manual says it does: per lane the exact sum of four unsigned times signed products.
inline __m256i emulated_dpbusd(__m256i sum, __m256i codes, __m256i x) {
  alignas(32) int32_t s[8];
  alignas(32) uint8_t u[32];
  alignas(32) int8_t v[32];
  _mm256_store_si256(reinterpret_cast<__m256i*>(s), sum);
  _mm256_store_si256(reinterpret_cast<__m256i*>(u), codes);
  _mm256_store_si256(reinterpret_cast<__m256i*>(v), x);
  for (int i = 0; i < 32; ++i) s[i / 4] += int32_t{u[i]} * v[i];
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(s));
}
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
#include "simd/avx2.h"
//
#include "micro/dot_avx_vnni.h"
#else
#include "simd/scalar.h"
//
#include "micro/dot_scalar.h"
#endif
//
#include "algo/decode.h"
#include "algo/tiles_int.h"

constexpr int kBlocks = 16;  // two tiles of the formats with eight blocks in each

// Bytes of two row tiles whose halves at even offsets are scales: no infinity and no NaN.
std::vector<uint8_t> random_tiles(std::mt19937& random, int64_t nbytes, int64_t tile, int header) {
  std::vector<uint8_t> bytes(static_cast<size_t>(nbytes));
  for (auto& b : bytes) b = static_cast<uint8_t>(random());
  for (int64_t at = 0; at < nbytes; at += tile)
    for (int i = 0; i < std::min(header, 64); i += 2)
      bytes[static_cast<size_t>(at + i + 1)] = 0x20 | (random() & 0x8f);
  return bytes;
}

template <class Layout>
void print_products(const char* stem, std::mt19937& random) {
  const int tile_blocks = Layout::kTileBlocks > 0 ? Layout::kTileBlocks : 4;
  const int64_t tile_bytes = Layout::kHeader + int64_t{tile_blocks} * Layout::kBlock;
  const int64_t stride = kBlocks / tile_blocks * tile_bytes;
  constexpr int kTokens = 19;
  const auto weights = random_tiles(random, 2 * stride, tile_bytes, Layout::kHeader);
  std::vector<ActivationBlock> x(kTokens * kBlocks);
  for (auto& block : x) {
    for (auto& q : block.q) q = random() % 8 == 0 ? -128 : static_cast<int8_t>(random());
    block.scale = static_cast<float>(random() % 1000) / 1024.0f;
    for (int s = 0; s < 2; ++s) {
      if (Layout::kMin) {
        block.sum[s] = static_cast<float>(random() % 1000) - 500.0f;
      } else {
        block.init[s] = static_cast<int32_t>(random() % 100000) - 50000;
      }
    }
  }
  std::vector<float> out(kTokens * 2 * kTileChannels);
  alignas(64) static std::byte scratch[kTileScratchBytes];
  for (int tiles = 1; tiles <= 2; ++tiles) {
    for (int m : {1, 2, 3, 5, kTokens}) {
      TileJob job{};
      job.tile[0] = weights.data();
      job.tile[1] = weights.data() + (tiles - 1) * stride;
      job.tiles = tiles;
      job.tile_blocks = tile_blocks;
      job.tile_bytes = tile_bytes;
      job.blocks = kBlocks;
      job.act.blocks = kBlocks;
      job.act.packed = x.data();
      job.m = m;
      job.out = out.data();
      job.scratch = scratch;
      int_tiles<Layout>(job);
      std::printf("%s %d %d", stem, tiles, m);
      for (int i = 0; i < m * tiles * kTileChannels; ++i)
        std::printf(" %08x", std::bit_cast<uint32_t>(out[static_cast<size_t>(i)]));
      std::printf("\n");
    }
  }
}

template <class Layout>
void print_integer_products(const char* stem, std::mt19937& random) {
  if constexpr (!Layout::kFloat) print_products<Layout>(stem, random);
}

}  // namespace
}  // namespace moestro

int main() {
  std::mt19937 random(7);
#define MOESTRO_FORMAT(kind, layout, stem, grouped) \
  moestro::print_integer_products<moestro::layout>(stem, random);
#include "formats/formats.def"
#undef MOESTRO_FORMAT
}
