// The Hadamard transform of groups of neighbours spreads single large values over their group, so that rounding a row to bytes
// loses less. A product whose input and weights have both been transformed is as before, times the size of a group:
// engine/kernels/cpu/int8_weights.py transforms the weights.
#pragma once

#include "quads.h"

namespace {

// A butterfly of the Hadamard transform: lanes i and i + width, where i has the bit `width` clear, become sum and difference.
template <int width>
inline Lanes spread_pairs(Lanes x) {
#if !defined(NO_VECTORS) && defined(__AVX512F__)
  const __m512 own = __m512(x), one = _mm512_set1_ps(1.0f);
  constexpr uint32_t is_minus = width == 1 ? 0xaaaa : width == 2 ? 0xcccc : width == 4 ? 0xf0f0 : 0xff00;
  __m512 other;
  if constexpr (width == 1) other = _mm512_permute_ps(own, 0xb1);
  if constexpr (width == 2) other = _mm512_permute_ps(own, 0x4e);
  if constexpr (width == 4) other = _mm512_shuffle_f32x4(own, own, 0xb1);
  if constexpr (width == 8) other = _mm512_shuffle_f32x4(own, own, 0x4e);
  // own times 1 or -1, + other: rounded as the sum and the difference.
  return Lanes(_mm512_fmadd_ps(own, _mm512_mask_sub_ps(one, __mmask16(is_minus), _mm512_setzero_ps(), one), other));
#else
  float from[16], to[16];
  store_lanes(from, x);
  for (int i = 0; i < 16; i++) to[i] = i & width ? from[i ^ width] - from[i] : from[i] + from[i ^ width];
  return load_lanes(to);
#endif
}

// Transforms the 16 N neighbours from `first` on. values(i): the 16 from i on, read before any result is stored. Returns the
// larger of `most` and the magnitudes.
template <int N, typename Values>
inline Lanes spread_vectors(const Values& values, int64_t first, float* to, Lanes most) {
  Lanes lanes[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; i++)
    lanes[i] = spread_pairs<8>(spread_pairs<4>(spread_pairs<2>(spread_pairs<1>(values(first + 16 * i)))));
#pragma GCC unroll 4
  for (int width = 1; width < N; width *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
      if (i & width) continue;
      const Lanes a = lanes[i], b = lanes[i + width];
      lanes[i] = a + b, lanes[i + width] = a - b;
    }
  Lanes odd = {};
#pragma GCC unroll 16
  for (int i = 0; i < N; i++) {
    (i % 2 ? odd : most) = larger_magnitude(i % 2 ? odd : most, lanes[i]);
    store_lanes(to + first + 16 * i, lanes[i]);
  }
  return larger(most, odd);
}

// `spread_vectors` of groups of 16 N values; returns the largest magnitude.
template <int N, typename Values>
inline float spread_groups(const Values& values, float* to, int64_t size) {
  Lanes most = {};
  for (int64_t i = 0; i < size; i += 16 * N) most = spread_vectors<N>(values, i, to, most);
  return largest_lane(most);
}

// Calls f with a constant N: 16 N is the largest power of two that divides `size`, at most 256.
template <typename F>
inline auto by_group(int64_t size, F f) {
  if (size % 256 == 0) return f(std::integral_constant<int, 16>());
  if (size % 128 == 0) return f(std::integral_constant<int, 8>());
  if (size % 64 == 0) return f(std::integral_constant<int, 4>());
  if (size % 32 == 0) return f(std::integral_constant<int, 2>());
  return f(std::integral_constant<int, 1>());
}

// Spreads a query or a key; returns the largest magnitude. Scores are then `spread_group(dim)` times as large.
template <typename T>
inline float spread_head(const T* x, float* to, int dim) {
  const auto values = [x](int64_t i) { return load_lanes(x + i); };
  return by_group(dim, [&](auto group) { return spread_groups<group>(values, to, dim); });
}
inline int spread_group(int dim) {
  return by_group(dim, [](auto group) { return 16 * group; });
}

}  // namespace
