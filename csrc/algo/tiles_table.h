// Tile products of formats whose codes are looked up in large tables. That costs more than a
// token's products do, so from two tokens on a K-block is decoded once, through L1, on every
// instruction set. The products over decoded codes are shared by all such formats of the same steps
// and bits: a format adds its decoder and one token's loop to each object, not another set of
// loops.
#pragma once

template <int kCodeSteps, int kCodeBits>
struct TableCodes {
  static constexpr int kSteps = kCodeSteps, kBits = kCodeBits, kZero = 0;
  static constexpr bool kMin = false;  // zeros come with the activations
};

template <class Layout>
void table_tiles(const TileJob& job) {
  if (job.m == 1) {
    direct_tiles<Layout, 1, false>(job, 0);
  } else {
    decoded_tiles<Layout, TableCodes<Layout::kSteps, Layout::kBits>>(job);
  }
}
