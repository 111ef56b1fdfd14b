// Products of bf16 pairs on vectors, for CPUs that have no tiles. Columns lie as tile products want them: pairs along the
// sum beside each other, 16 columns in a vector.
#pragma once

#include "number.h"

#ifdef HAS_AVX512
namespace {

// R rows of sums for 32 columns.
template <int R>
struct RowSums {
  __m512 low[R], high[R];

  void clear() {
    for (int r = 0; r < R; r++) low[r] = high[r] = _mm512_setzero_ps();
  }

  void load(const float* from, int64_t stride) {
    for (int r = 0; r < R; r++) low[r] = _mm512_loadu_ps(from + r * stride), high[r] = _mm512_loadu_ps(from + r * stride + 16);
  }

  void store(float* to, int64_t stride) const {
    for (int r = 0; r < R; r++) _mm512_storeu_ps(to + r * stride, low[r]), _mm512_storeu_ps(to + r * stride + 16, high[r]);
  }

  // The pair at x of each row times the pair of each column.
  __attribute__((always_inline)) void add(const bf16* x, int64_t stride, const bf16* columns, const bf16* more_columns) {
    const __m512bh a = __m512bh(_mm512_loadu_si512(columns)), b = __m512bh(_mm512_loadu_si512(more_columns));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride, sizeof pair);
      const __m512bh both = __m512bh(_mm512_set1_epi32(pair));
      low[r] = _mm512_dpbf16_ps(low[r], both, a);
      high[r] = _mm512_dpbf16_ps(high[r], both, b);
    }
  }
};

// Calls f(rows, first) with constants 12, 8 and 4 for `rows`, so that at least `count` rows are done: `count` rounded up to
// a multiple of 4. 24 sums and their operands are what 32 registers hold.
template <typename F>
__attribute__((always_inline)) inline void by_rows(int count, F f) {
  int first = 0;
  for (; count - first > 8; first += 12) f(std::integral_constant<int, 12>(), first);
  if (count - first > 4)
    f(std::integral_constant<int, 8>(), first);
  else if (count > first)
    f(std::integral_constant<int, 4>(), first);
}

}  // namespace
#endif
