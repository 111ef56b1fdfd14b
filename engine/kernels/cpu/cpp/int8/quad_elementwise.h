// The operations of an int8 decoder layer besides products and attention: rows to bytes, RMSNorm, rotation with the KV write.
// The order of a row's sums does not depend on other rows.
#pragma once

#include <tuple>

#include "quad_items.h"
#include "quad_product.h"

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

// `spread` over 16 N neighbours, without the factors. Returns the larger of `most` and the magnitudes.
template <int N>
inline Lanes spread_vectors(const bf16* x, float* to, Lanes most) {
  Lanes lanes[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; i++)
    lanes[i] = spread_pairs<8>(spread_pairs<4>(spread_pairs<2>(spread_pairs<1>(load_lanes(x + 16 * i)))));
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

// Converts a row of floats to bytes; returns its scale. largest: the largest magnitude.
inline float to_bytes(const float* x, float largest, uint8_t* to, int64_t size) {
  const float inverse = inverse_scale(largest);
  for (int64_t i = 0; i < size; i += 16) store_bytes(to + i, to_bytes(load_lanes(x + i), inverse));
  return byte_scale(largest);
}

// x / rms(x), times the weight unless it is null; returns the largest magnitude.
template <typename T>
float normed_row(const T* x, const float* weight, float* to, int64_t size, float epsilon) {
  const auto square = [x](int64_t i) {
    const Lanes lanes = load_lanes(x + i);
    return lanes * lanes;
  };
  Lanes even = {}, odd = {};
  int64_t at = 0;
  for (; at + 16 < size; at += 32) even += square(at), odd += square(at + 16);
  if (at < size) even += square(at);
  const float factor = 1.0f / std::sqrt(sum_lanes(even + odd) / float(size) + epsilon);
  Lanes most = {};
  for (int64_t i = 0; i < size; i += 16) {
    Lanes lanes = load_lanes(x + i) * factor;
    if (weight) lanes *= load_lanes(weight + i);
    most = larger_magnitude(most, lanes);
    store_lanes(to + i, lanes);
  }
  return largest_lane(most);
}

// A thread's buffer for a row of floats.
inline float* row_buffer(int64_t size) {
  static thread_local std::vector<float> buffer;
  if (int64_t(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

inline void norm_to_bytes(const bf16* x, const float* weight, const ByteRows& to, int64_t num_rows, int64_t size,
                          float epsilon) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    float* normed = row_buffer(size);
    const float largest = normed_row(x + row * size, weight, normed, size, epsilon);
    to.scales[row] = to_bytes(normed, largest, to.bytes + row * padded_depth(size), size);
  }
}

template <int N>
void spread_rows_to_bytes(const bf16* x, const ByteRows& to, int64_t num_rows, int64_t size) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    float* values = row_buffer(size);
    Lanes most = {};
    for (int64_t i = 0; i < size; i += 16 * N) most = spread_vectors<N>(x + row * size + i, values + i, most);
    to.scales[row] = to_bytes(values, largest_lane(most), to.bytes + row * padded_depth(size), size);
  }
}

// Spreads rows over 16 N neighbours and converts them to bytes; N is the largest power of two that divides a row, up to 16.
inline void spread_to_bytes(const bf16* x, const ByteRows& to, int64_t num_rows, int64_t size) {
  const int64_t num_vectors = size / 16;
  if (num_vectors % 16 == 0) return spread_rows_to_bytes<16>(x, to, num_rows, size);
  if (num_vectors % 8 == 0) return spread_rows_to_bytes<8>(x, to, num_rows, size);
  if (num_vectors % 4 == 0) return spread_rows_to_bytes<4>(x, to, num_rows, size);
  if (num_vectors % 2 == 0) return spread_rows_to_bytes<2>(x, to, num_rows, size);
  spread_rows_to_bytes<1>(x, to, num_rows, size);
}

// `spread` of a row, into the thread's buffer.
inline const float* spread_row(const bf16* x, int64_t size, int64_t group) {
  float* values = row_buffer(size);
  for (int64_t i = 0; i < size; i += 16) store_lanes(values + i, load_lanes(x + i));
  spread(values, size, group);
  return values;
}

// Transforms the residual stream to the basis in which layers compute, and back.
inline void spread_rows(bf16* x, int64_t num_rows, int64_t size, int64_t group) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    const float* values = spread_row(x + row * size, size, group);
    for (int64_t i = 0; i < size; i += 16) store_lanes(x + row * size + i, load_lanes(values + i));
  }
}

// Converts a head of a token to bytes; returns the scale in bf16, as the KV cache stores it.
template <typename T>
bf16 head_to_bytes(const T* x, int8_t* to, int dim) {
  Lanes most = {};
  for (int d = 0; d < dim; d += 16) most = larger_magnitude(most, load_lanes(x + d));
  bf16 scale;
  store(scale, byte_scale(largest_lane(most)));
  const float inverse = load(scale) > 0 ? 1.0f / load(scale) : 0.0f;
  for (int d = 0; d < dim; d += 16) {
    Lanes rounded = load_lanes(x + d) * inverse;
    rounded = rounded > 127.0f ? Lanes{} + 127.0f : rounded;  // the scale may have been rounded down
    rounded = rounded < -127.0f ? Lanes{} - 127.0f : rounded;
    store_bytes(to + d, to_bytes(rounded, 1.0f) ^ 128);
  }
  return scale;
}

// to[4 d] = x[d]. Elements between them are those of other tokens, which other threads may write at the same time.
inline void store_every_fourth(const int8_t* x, int8_t* to, int dim) {
#if !defined(NO_VECTORS) && defined(__AVX512BW__)
  for (int d = 0; d < dim; d += 16) {
    const __m512i spread = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(x + d)));
    _mm512_mask_storeu_epi8(to + 4 * d, 0x1111111111111111, spread);
  }
#else
  for (int d = 0; d < dim; d++) to[4 * d] = x[d];
#endif
}

// The rotation of halves of a head. to: not `x`.
template <typename T>
void rotate_head(const T* x, const float* cos, const float* sin, float* to, int dim) {
  const int half = dim / 2;
  for (int d = 0; d < half; d++) {
    const float a = load(x[d]), b = load(x[d + half]);
    to[d] = a * cos[d] - b * sin[d];
    to[d + half] = b * cos[d + half] + a * sin[d + half];
  }
}

// As in elementwise.h, for rows in bf16 and KV in bytes.
inline void rotate_and_store(bf16* qkv, const float* cos, const float* sin, const float* q_norm, const float* k_norm,
                             float epsilon, int8_t* keys, int8_t* values, const AttentionShape& shape,
                             const AttentionWork& work) {
  const int num_q_heads = shape.num_q_heads, num_kv_heads = shape.num_kv_heads, dim = shape.dim, block_size = shape.block_size;
  const int64_t sub_bytes = sub_block_bytes(dim), head_stride = block_size / SUB * sub_bytes;
  // Of the first head: where a row's sub-blocks of keys and of values begin, and the row's token in them.
  const auto place = [&](int64_t row) {
    const int64_t block = work.slots[row] / block_size;
    const int offset = int(work.slots[row] % block_size);
    const int64_t at = block * num_kv_heads * head_stride + offset / SUB * sub_bytes;
    return std::tuple(keys + at, values + at, offset % SUB);
  };
#pragma omp parallel for
  for (int64_t row = 0; row < work.num_rows; row++) {
    if (work.is_elsewhere(row + 1)) {
      const auto [next_keys, next_values, next_token] = place(row + 1);
      for (int h = 0; h < num_kv_heads; h++) {
        fetch_to_write(next_keys + h * head_stride + next_token / 16 * 16 * dim, 16 * dim);
        fetch_to_write(next_values + h * head_stride + next_token / 4 * 4 * dim, 4 * dim);
        fetch_to_write(next_keys + h * head_stride + SUB * dim, SUB * sizeof(bf16));
        fetch_to_write(next_values + h * head_stride + SUB * dim, SUB * sizeof(bf16));
      }
    }
    alignas(64) float normed[MAX_DIM], rotated[MAX_DIM];
    int8_t bytes[MAX_DIM];
    const float *row_cos = cos + row * dim, *row_sin = sin + row * dim;
    const auto [own_keys, own_values, token] = place(row);
    for (int h = 0; h < num_q_heads + 2 * num_kv_heads; h++) {
      bf16* head = qkv + row * shape.qkv_size() + h * dim;
      const int kv_head = h < num_q_heads + num_kv_heads ? h - num_q_heads : h - num_q_heads - num_kv_heads;
      if (h >= num_q_heads + num_kv_heads) {
        int8_t* to = own_values + kv_head * head_stride;
        const bf16 scale = head_to_bytes(head, bytes, dim);
        store_every_fourth(bytes, to + token / 4 * 4 * dim + token % 4, dim);
        std::memcpy(to + SUB * dim + token * sizeof scale, &scale, sizeof scale);
        continue;
      }
      const float* norm = h < num_q_heads ? q_norm : k_norm;
      if (norm) {
        normed_row(head, norm, normed, dim, epsilon);
        rotate_head(normed, row_cos, row_sin, rotated, dim);
      } else {
        rotate_head(head, row_cos, row_sin, rotated, dim);
      }
      if (h < num_q_heads) {
        for (int d = 0; d < dim; d += 16) store_lanes(head + d, load_lanes(rotated + d));
        continue;
      }
      int8_t* to = own_keys + kv_head * head_stride;
      const bf16 scale = head_to_bytes(rotated, bytes, dim);
      for (int d = 0; d < dim; d += 4) std::memcpy(to + token / 16 * 16 * dim + d * 16 + token % 16 * 4, bytes + d, 4);
      std::memcpy(to + SUB * dim + token * sizeof scale, &scale, sizeof scale);
    }
  }
}

}  // namespace
