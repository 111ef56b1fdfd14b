// The operations of a plain decoder layer besides products and attention: RMSNorm, rotation with the KV write.
#pragma once

#include <tuple>

#include "attention.h"

namespace {

template <typename T>
void rms_norm_row(const T* x, const T* weight, T* out, int64_t size, float epsilon) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; i++) squares += load(x[i]) * load(x[i]);
  const float factor = 1.0f / std::sqrt(squares / float(size) + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < size; i++) store(out[i], load(x[i]) * factor * load(weight[i]));
}

#ifdef HAS_AVX512
// The same with AVX-512 intrinsics, which are faster than what compilers make of the loops above.
inline void rms_norm_row(const bf16* x, const bf16* weight, bf16* out, int64_t size, float epsilon) {
  if (size % 32) return rms_norm_row<bf16>(x, weight, out, size, epsilon);
  __m512 low = _mm512_setzero_ps(), high = low;
  for (int64_t i = 0; i < size; i += 32) {
    const __m512 a = load_16(x + i), b = load_16(x + i + 16);
    low = _mm512_fmadd_ps(a, a, low), high = _mm512_fmadd_ps(b, b, high);
  }
  const float squares = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(squares / float(size) + epsilon));
  for (int64_t i = 0; i < size; i += 16)
    store_16(out + i, _mm512_mul_ps(_mm512_mul_ps(load_16(x + i), factor), load_16(weight + i)));
}
#endif

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t num_rows, int64_t size, float epsilon) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++)
    rms_norm_row(x + row * size, weight, out + row * size, size, epsilon);
}

// x[d] cos[d] - x[d + D/2] sin[d], x[d + D/2] cos[d + D/2] + x[d] sin[d + D/2]: the rotation of halves, in fp32.
template <typename T>
void rotate(T* x, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
#pragma omp simd
  for (int d = 0; d < half; d++) {
    const float a = load(x[d]), b = load(x[d + half]);
    store(x[d], a * cos[d] - b * sin[d]);
    store(x[d + half], b * cos[d + half] + a * sin[d + half]);
  }
}

// to[2 d] = x[d]. Elements between them are those of the next token, which another thread may write at the same time.
template <typename T>
void store_every_other(const T* x, T* to, int dim) {
  for (int d = 0; d < dim; d++) to[2 * d] = x[d];
}

#ifdef HAS_AVX512
inline void rotate(bf16* x, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  if (half % 16) return rotate<bf16>(x, cos, sin, dim);
  for (int d = 0; d < half; d += 16) {
    const __m512 a = load_16(x + d), b = load_16(x + d + half);
    const __m512 from_b = _mm512_mul_ps(b, _mm512_loadu_ps(sin + d));
    const __m512 from_a = _mm512_mul_ps(a, _mm512_loadu_ps(sin + d + half));
    store_16(x + d, _mm512_fmsub_ps(a, _mm512_loadu_ps(cos + d), from_b));
    store_16(x + d + half, _mm512_fmadd_ps(b, _mm512_loadu_ps(cos + d + half), from_a));
  }
}

inline void store_every_other(const bf16* x, bf16* to, int dim) {
  for (int d = 0; d < dim; d += 16) {
    const __m512i spread = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(x + d)));
    _mm512_mask_storeu_epi16(to + 2 * d, 0x55555555, spread);
  }
}
#endif

// Norms query and key heads unless the norms are null, rotates them, all in place, and writes keys and values to the KV.
template <typename T>
void rotate_and_store(T* qkv, const float* cos, const float* sin, const T* q_norm, const T* k_norm, float epsilon, T* keys,
                      T* values, const AttentionShape& shape, const AttentionWork& work) {
  const int num_q_heads = shape.num_q_heads, num_kv_heads = shape.num_kv_heads, dim = shape.dim, block_size = shape.block_size;
  const int64_t head_stride = int64_t(block_size) * dim;
  // Of the first head: the 16 keys and 2 values of which a row's own are one, and the row's token in its sub-block.
  const auto place = [&](int64_t row) {
    const int64_t block = work.slots[row] / block_size;
    const int offset = int(work.slots[row] % block_size), token = offset % SUB;
    const int64_t at = block * num_kv_heads * head_stride + int64_t(offset - token) * dim;
    return std::tuple(keys + at + token / 16 * 16 * dim, values + at + token / 2 * 2 * dim, token);
  };
#pragma omp parallel for
  for (int64_t row = 0; row < work.num_rows; row++) {
    if (work.is_elsewhere(row + 1)) {
      const auto [next_keys, next_values, _] = place(row + 1);
      for (int h = 0; h < num_kv_heads; h++) {
        fetch_to_write(next_keys + h * head_stride, 16 * dim * sizeof(T));
        fetch_to_write(next_values + h * head_stride, 2 * dim * sizeof(T));
      }
    }
    T* x = qkv + row * shape.qkv_size();
    for (int h = 0; h < num_q_heads + num_kv_heads; h++) {
      const T* norm = h < num_q_heads ? q_norm : k_norm;
      if (norm) rms_norm_row(x + h * dim, norm, x + h * dim, dim, epsilon);
      rotate(x + h * dim, cos + row * dim, sin + row * dim, dim);
    }
    const auto [own_keys, own_values, token] = place(row);
    for (int h = 0; h < num_kv_heads; h++) {
      const T* k = x + (num_q_heads + h) * dim;
      const T* v = k + num_kv_heads * dim;
      T* to_k = own_keys + h * head_stride + token % 16 * 2;
      T* to_v = own_values + h * head_stride + token % 2;
      for (int d = 0; d < dim; d += 2) std::memcpy(static_cast<void*>(to_k + d * 16), k + d, 2 * sizeof(T));
      store_every_other(v, to_v, dim);
    }
  }
}

}  // namespace
