// The eight AMX tile registers. Kernels are templates over HwTile (here) or EmuTile
// (amx_tile_emulated.h), which have the same members; an object of either is the only way to the
// registers, and its end releases them.
#pragma once

// Memory operand of LDTILECFG, palette 1: up to 16 rows of up to 64 bytes per tile. Tiles that no
// kernel uses stay at 0 x 0.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int tile_colsb) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    colsb[tile] = static_cast<uint16_t>(tile_colsb);
  }
};
static_assert(sizeof(TileConfig) == 64);

#if defined(__x86_64__)
// The instructions themselves. Written as assembly because the intrinsics of GCC 12 do not tell the
// compiler that they read and write memory: stores into an operand may then move past its load.
class HwTile {
 public:
  HwTile() = default;
  HwTile(const HwTile&) = delete;
  HwTile& operator=(const HwTile&) = delete;
  ~HwTile() { __asm__ volatile("tilerelease"); }

  // Sets the shapes and zeroes all tiles.
  void configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }
  template <int kTile>
  void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  void load(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  void store(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  // C += A x B over groups of four bytes. A is signed or unsigned (first letter), so is B (second).
  template <int kC, int kA, int kB>
  void dot_su() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
  template <int kC, int kA, int kB>
  void dot_us() {
    __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
  template <int kC, int kA, int kB>
  void dot_uu() {
    __asm__ volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
  template <int kC, int kA, int kB>
  void dot_ss() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
  // C += A x B over pairs of bf16.
  template <int kC, int kA, int kB>
  void dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};
#endif
