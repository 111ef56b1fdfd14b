// The operations of an int8 decoder layer besides products and attention: rows to bytes, RMSNorm, rotation with the KV write.
// The order of a row's sums does not depend on other rows.
#pragma once

#include <tuple>

#include "quad_items.h"
#include "quad_product.h"

namespace {

// Converts a row of floats to bytes; returns its scale. largest: the largest magnitude.
inline float to_bytes(const float* x, float largest, uint8_t* to, int64_t size) {
  const float inverse = inverse_scale(largest);
  for (int64_t i = 0; i < size; i += 16) store_bytes(to + i, to_bytes(load_lanes(x + i), inverse));
  return byte_scale(largest);
}

// 1 / rms(x).
template <typename T>
float inverse_rms(const T* x, int64_t size, float epsilon) {
  const auto square = [x](int64_t i) {
    const Lanes lanes = load_lanes(x + i);
    return lanes * lanes;
  };
  Lanes even = {}, odd = {};
  int64_t at = 0;
  for (; at + 16 < size; at += 32) even += square(at), odd += square(at + 16);
  if (at < size) even += square(at);
  return 1.0f / std::sqrt(sum_lanes(even + odd) / float(size) + epsilon);
}

// A thread's buffer for a row of floats.
inline float* row_buffer(int64_t size) {
  static thread_local std::vector<float> buffer;
  if (int64_t(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

// Spreads rows over groups of `by_group`, and converts them to bytes. values(row): the row as a function of `spread_vectors`.
template <typename Values>
void spread_to_bytes(const Values& values, const ByteRows& to, int64_t num_rows, int64_t size) {
  by_group(size, [&](auto group) {
#pragma omp parallel for
    for (int64_t row = 0; row < num_rows; row++) {
      float* spread = row_buffer(size);
      const float largest = spread_groups<group>(values(row), spread, size);
      to.scales[row] = to_bytes(spread, largest, to.bytes + row * padded_depth(size), size);
    }
  });
}

// The same of x / rms(x), times a factor for each column.
inline void norm_to_bytes(const bf16* x, const float* factors, const ByteRows& to, int64_t num_rows, int64_t size,
                          float epsilon) {
  const auto normed = [=](int64_t row) {
    const bf16* from = x + row * size;
    const float factor = inverse_rms(from, size, epsilon);
    return [=](int64_t i) { return load_lanes(from + i) * factor * load_lanes(factors + i); };
  };
  spread_to_bytes(normed, to, num_rows, size);
}

// Converts a head of a token to bytes; returns the scale in bf16, as the KV cache stores it. most: the largest magnitude.
template <typename T>
bf16 head_to_bytes(const T* x, float most, int8_t* to, int dim) {
  bf16 scale;
  store(scale, byte_scale(most));
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
    alignas(64) float normed[MAX_DIM], rotated[MAX_DIM], spread_keys[MAX_DIM];
    int8_t bytes[MAX_DIM];
    const float *row_cos = cos + row * dim, *row_sin = sin + row * dim;
    const auto [own_keys, own_values, token] = place(row);
    for (int h = 0; h < num_q_heads + 2 * num_kv_heads; h++) {
      bf16* head = qkv + row * shape.qkv_size() + h * dim;
      const int kv_head = h < num_q_heads + num_kv_heads ? h - num_q_heads : h - num_q_heads - num_kv_heads;
      if (h >= num_q_heads + num_kv_heads) {
        int8_t* to = own_values + kv_head * head_stride;
        Lanes most = {};
        for (int d = 0; d < dim; d += 16) most = larger_magnitude(most, load_lanes(head + d));
        const bf16 scale = head_to_bytes(head, largest_lane(most), bytes, dim);
        store_every_fourth(bytes, to + token / 4 * 4 * dim + token % 4, dim);
        std::memcpy(to + SUB * dim + token * sizeof scale, &scale, sizeof scale);
        continue;
      }
      const float* norm = h < num_q_heads ? q_norm : k_norm;
      if (norm) {
        const float factor = inverse_rms(head, dim, epsilon);
        for (int d = 0; d < dim; d += 16) store_lanes(normed + d, load_lanes(head + d) * factor * load_lanes(norm + d));
        rotate_head(normed, row_cos, row_sin, rotated, dim);
      } else {
        rotate_head(head, row_cos, row_sin, rotated, dim);
      }
      if (h < num_q_heads) {
        for (int d = 0; d < dim; d += 16) store_lanes(head + d, load_lanes(rotated + d));
        continue;
      }
      int8_t* to = own_keys + kv_head * head_stride;
      const float most = spread_head(rotated, spread_keys, dim);
      const bf16 scale = head_to_bytes(spread_keys, most, bytes, dim);
      for (int d = 0; d < dim; d += 4) std::memcpy(to + token / 16 * 16 * dim + d * 16 + token % 16 * 4, bytes + d, 4);
      std::memcpy(to + SUB * dim + token * sizeof scale, &scale, sizeof scale);
    }
  }
}

}  // namespace
