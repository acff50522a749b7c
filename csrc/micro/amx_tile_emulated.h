// A model of the AMX tile registers in plain C++, after the operation sections of Intel's Software
// Developer's Manual: palette 1, shapes, strides, and the arithmetic to the bit. What the hardware
// answers with a fault throws Error here. Needs core/error.h before the namespace it is included
// in.
#pragma once

// Float32 steps as the tile unit takes them: denormal operands count as zero, results are rounded
// to nearest even once, tiny ones flushed to zero; no flag or mode of the processor plays a part.
inline float flush_denormal(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
// `rounded`, flushed if the exact result, rounded to 24 bits whatever its exponent, is below the
// least normal number. That differs from the rounded number only where it equals 2^-126, and there
// the exact result of bf16 products fits a double.
inline float flush_tiny(float rounded, double exact) {
  const bool tiny = std::fabs(exact) < 0x1p-126 - 0x1p-151;
  return tiny || std::fabs(rounded) < 0x1p-126f ? std::copysign(0.0f, rounded) : rounded;
}
inline float tile_fma(float a, float b, float c) {
  a = flush_denormal(a);
  b = flush_denormal(b);
  c = flush_denormal(c);
  const double exact = double{a} * b + c;
  return flush_tiny(std::fma(a, b, c), exact);
}
inline float tile_add(float a, float b) {
  a = flush_denormal(a);
  b = flush_denormal(b);
  return flush_tiny(a + b, double{a} + b);
}

class EmuTile {
 public:
  EmuTile() = default;
  EmuTile(const EmuTile&) = delete;
  EmuTile& operator=(const EmuTile&) = delete;

  void configure(const TileConfig& config) {
    check(config.palette == 1 && config.start_row == 0, "the palette is not 1 from row 0");
    for (const uint8_t byte : config.reserved) check(byte == 0, "reserved bytes are not zero");
    for (int t = 0; t < 16; ++t) {
      const int rows = config.rows[t], colsb = config.colsb[t];
      check(t < kTiles || (rows == 0 && colsb == 0), "palette 1 has eight tiles");
      check(rows <= kRows && colsb <= kRowBytes, "a tile is larger than 16 x 64 bytes");
      check((rows == 0) == (colsb == 0), "a tile has rows without columns");
      if (t >= kTiles) continue;
      tiles_[t] = Register{};
      tiles_[t].rows = rows;
      tiles_[t].colsb = colsb;
    }
  }
  template <int kTile>
  void zero() {
    std::memset(used(kTile).bytes, 0, sizeof tiles_[kTile].bytes);
  }
  template <int kTile>
  void load(const void* p, int64_t stride) {
    Register& tile = used(kTile);
    std::memset(tile.bytes, 0, sizeof tile.bytes);
    for (int r = 0; r < tile.rows; ++r)
      std::memcpy(tile.bytes[r], static_cast<const uint8_t*>(p) + r * stride, size_t(tile.colsb));
  }
  template <int kTile>
  void store(void* p, int64_t stride) {
    const Register& tile = used(kTile);
    for (int r = 0; r < tile.rows; ++r)
      std::memcpy(static_cast<uint8_t*>(p) + r * stride, tile.bytes[r], size_t(tile.colsb));
  }
  template <int kC, int kA, int kB>
  void dot_su() {
    dot_bytes<int8_t, uint8_t, kC, kA, kB>();
  }
  template <int kC, int kA, int kB>
  void dot_us() {
    dot_bytes<uint8_t, int8_t, kC, kA, kB>();
  }
  template <int kC, int kA, int kB>
  void dot_uu() {
    dot_bytes<uint8_t, uint8_t, kC, kA, kB>();
  }
  template <int kC, int kA, int kB>
  void dot_ss() {
    dot_bytes<int8_t, int8_t, kC, kA, kB>();
  }

  // Even and odd elements make two chains that start at zero; their sum joins C.
  template <int kC, int kA, int kB>
  void dot_bf16() {
    check_shapes<kC, kA, kB>();
    const Register &a = tiles_[kA], &b = tiles_[kB];
    for (int m = 0; m < a.rows; ++m)
      for (int n = 0; n < b.colsb / 4; ++n) {
        float even = 0.0f, odd = 0.0f;
        for (int k = 0; k < a.colsb / 4; ++k) {
          even = tile_fma(bf16_at(a, m, 2 * k), bf16_at(b, k, 2 * n), even);
          odd = tile_fma(bf16_at(a, m, 2 * k + 1), bf16_at(b, k, 2 * n + 1), odd);
        }
        put(kC, m, n, tile_add(at<float>(tiles_[kC], m, n), tile_add(even, odd)));
      }
  }

 private:
  static constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;
  struct Register {
    int rows = 0, colsb = 0;
    uint8_t bytes[kRows][kRowBytes] = {};
  };

  static void check(bool holds, const char* fault) {
    if (!holds) throw Error(ErrorKind::kInvalidRequest, std::string("tile model: ") + fault);
  }
  Register& used(int tile) {
    check(tiles_[tile].rows > 0, "a tile is used that has no shape");
    return tiles_[tile];
  }
  template <int kC, int kA, int kB>
  void check_shapes() {
    static_assert(kC != kA && kC != kB && kA != kB, "a fault: operands must be three tiles");
    const Register &c = used(kC), &a = used(kA), &b = used(kB);
    check(c.rows == a.rows, "C and A differ in rows");
    check(c.colsb == b.colsb, "C and B differ in columns");
    check(a.colsb % 4 == 0 && c.colsb % 4 == 0 && a.colsb / 4 == b.rows,
          "the depth of A is not the rows of B");
  }
  template <class T>
  static T at(const Register& tile, int row, int index) {
    T value;
    std::memcpy(&value, tile.bytes[row] + sizeof(T) * size_t(index), sizeof(T));
    return value;
  }
  template <class T>
  void put(int tile, int row, int index, T value) {
    std::memcpy(tiles_[tile].bytes[row] + sizeof(T) * size_t(index), &value, sizeof(T));
  }
  static float bf16_at(const Register& tile, int row, int index) {
    return bf16_to_f32(at<uint16_t>(tile, row, index));
  }

  // Sums wrap modulo 2^32, as the hardware's do.
  template <class A, class B, int kC, int kA, int kB>
  void dot_bytes() {
    check_shapes<kC, kA, kB>();
    const Register &a = tiles_[kA], &b = tiles_[kB];
    for (int m = 0; m < a.rows; ++m) {
      uint32_t sums[16];
      for (int n = 0; n < b.colsb / 4; ++n) sums[n] = at<uint32_t>(tiles_[kC], m, n);
      for (int k = 0; k < a.colsb / 4; ++k)
        for (int n = 0; n < b.colsb / 4; ++n)
          for (int i = 0; i < 4; ++i)
            sums[n] += uint32_t(int32_t{at<A>(a, m, 4 * k + i)} * at<B>(b, k, 4 * n + i));
      for (int n = 0; n < b.colsb / 4; ++n) put(kC, m, n, sums[n]);
    }
  }

  Register tiles_[kTiles];
};
