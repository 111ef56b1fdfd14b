// What a decoder layer does between its products and its attention: RMSNorm, rotary embedding with the KV write, SwiGLU.
#pragma once

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

template <typename T>
void rotate_and_store(T* qkv, const float* cos, const float* sin, const T* q_norm, const T* k_norm, float epsilon,
                      const int64_t* slots, T* keys, T* values, int64_t num_rows, int num_q_heads, int num_kv_heads,
                      int dim, int block_size) {
  const int64_t stride = int64_t(num_q_heads + 2 * num_kv_heads) * dim;
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    T* x = qkv + row * stride;
    for (int h = 0; h < num_q_heads + num_kv_heads; h++) {
      const T* norm = h < num_q_heads ? q_norm : k_norm;
      if (norm) rms_norm_row(x + h * dim, norm, x + h * dim, dim, epsilon);
      rotate(x + h * dim, cos + row * dim, sin + row * dim, dim);
    }
    const int64_t block = slots[row] / block_size;
    const int offset = int(slots[row] % block_size);
    for (int h = 0; h < num_kv_heads; h++) {
      const int64_t at = (block * num_kv_heads + h) * block_size * dim + int64_t(offset) / SUB * SUB * dim;
      const int token = offset % SUB;
      const T* k = x + (num_q_heads + h) * dim;
      const T* v = k + num_kv_heads * dim;
      T* to_k = keys + at + token / 16 * 16 * dim + token % 16 * 2;
      T* to_v = values + at + token / 2 * 2 * dim + token % 2;
      for (int d = 0; d < dim; d += 2) to_k[d * 16] = k[d], to_k[d * 16 + 1] = k[d + 1];
      for (int d = 0; d < dim; d++) to_v[2 * d] = v[d];
    }
  }
}

// silu(gate) * up, from rows [gate | up].
template <typename T>
void swiglu(const T* gate_up, T* out, int64_t num_rows, int64_t size) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    const T* gate = gate_up + row * 2 * size;
    const T* up = gate + size;
    T* to = out + row * size;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) store(to[i], silu(load(gate[i])) * load(up[i]));
  }
}

}  // namespace
