// Products of bf16 pairs on vectors, for CPUs without tiles. The layout is that of tile products: the two elements of a
// pair along the sum are adjacent, and a vector has 16 columns.
#pragma once

#include "number.h"
#include "rows.h"

#ifdef HAS_AVX512
namespace {

// Sums of R rows for 16 H columns.
template <int R, int H = 2>
struct RowSums {
  __m512 sums[H][R];

  void clear() {
    for (int h = 0; h < H; h++)
      for (int r = 0; r < R; r++) sums[h][r] = _mm512_setzero_ps();
  }

  void load(const float* from, int64_t stride) {
    for (int r = 0; r < R; r++)
      for (int h = 0; h < H; h++) sums[h][r] = _mm512_loadu_ps(from + r * stride + 16 * h);
  }

  void store(float* to, int64_t stride) const {
    for (int r = 0; r < R; r++)
      for (int h = 0; h < H; h++) _mm512_storeu_ps(to + r * stride + 16 * h, sums[h][r]);
  }

  // Adds the pair at x of each row times the pair of each column; the second 16 columns are `next` elements further on.
  __attribute__((always_inline)) void add(const bf16* x, int64_t stride, const bf16* columns, int64_t next) {
    __m512bh lanes[H];
    for (int h = 0; h < H; h++) lanes[h] = __m512bh(_mm512_loadu_si512(columns + h * next));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride, sizeof pair);
      const __m512bh both = __m512bh(_mm512_set1_epi32(pair));
      for (int h = 0; h < H; h++) sums[h][r] = _mm512_dpbf16_ps(sums[h][r], both, lanes[h]);
    }
  }
};

}  // namespace
#endif
