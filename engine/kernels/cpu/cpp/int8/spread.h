// Transforms that spread single large values over many, so that rounding a row to bytes loses less. Both factors of a product
// are transformed, which leaves it as it is: engine/kernels/cpu/int8_weights.py transforms the weights.
#pragma once

#include <vector>

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

// Hadamard transform of groups of `group` neighbours, a power of two from 16 on. It preserves lengths, and is its own
// inverse. A product whose input and weights have both been transformed has the same result, and an outlier of the input is
// spread over its group, so that rounding to bytes loses less. engine/kernels/cpu/int8_weights.py transforms the weights.
inline void spread(float* x, int64_t size, int64_t group) {
  constexpr float factor = 0.70710678f;
  for (int64_t i = 0; i < size; i += 16) {
    const Lanes pairs = spread_pairs<2>(spread_pairs<1>(load_lanes(x + i)) * factor) * factor;
    store_lanes(x + i, spread_pairs<8>(spread_pairs<4>(pairs) * factor) * factor);
  }
  for (int64_t width = 16; width < group; width *= 2)
    for (int64_t first = 0; first < size; first += 2 * width)
      for (int64_t i = first; i < first + width; i++) {
        const float a = x[i], b = x[i + width];
        x[i] = (a + b) * factor, x[i + width] = (a - b) * factor;
      }
}

// The factors [count][count] of the discrete Hartley transform, which preserves lengths, is its own inverse, and has no
// factor much larger than the others for any count.
inline const float* hartley(int64_t count) {
  thread_local std::vector<float> factors;
  if (int64_t(factors.size()) == count * count) return factors.data();
  factors.resize(count * count);
  for (int64_t i = 0; i < count * count; i++) {
    const double angle = 6.283185307179586 * double(i / count * (i % count) % count) / double(count);
    factors[i] = float((std::cos(angle) + std::sin(angle)) / std::sqrt(double(count)));
  }
  return factors.data();
}

// `spread` over 16 N neighbours, without the factors; or only over N, 16 apart. Returns the larger of `most` and the
// magnitudes.
template <int N, bool with_neighbours, typename T>
inline Lanes spread_vectors(const T* x, float* to, Lanes most) {
  Lanes lanes[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; i++) {
    lanes[i] = load_lanes(x + 16 * i);
    if (with_neighbours) lanes[i] = spread_pairs<8>(spread_pairs<4>(spread_pairs<2>(spread_pairs<1>(lanes[i]))));
  }
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
    store_lanes(to + 16 * i, lanes[i]);
  }
  return larger(most, odd);
}

// `spread_vectors` of groups of 16 N values; returns the largest magnitude.
template <int N, bool with_neighbours, typename T>
inline float spread_groups(const T* x, float* to, int64_t size) {
  Lanes most = {};
  for (int64_t i = 0; i < size; i += 16 * N) most = spread_vectors<N, with_neighbours>(x + i, to + i, most);
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

// Spreads a query or a key over `head_group(dim)` values, 16 apart, without the factors; returns the largest magnitude. So
// scores are that number times as large. Spreading over neighbours, too, would cost prompts 1 % of their time
// (docs/tries.md).
template <typename T>
inline float spread_head(const T* x, float* to, int dim) {
  return by_group(dim, [&](auto group) { return spread_groups<group, false>(x, to, dim); });
}
inline int head_group(int dim) { return (dim & -dim) / 16; }

}  // namespace
