// Operations of decoder layers that are not plain: LayerNorm, norms with an offset or over all heads, residual branches.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "activation.h"

// The further weights and settings of such a layer; engine/kernels/cpu/branched_layers.py has the same fields. Absent
// tensors are null.
template <typename T>
struct Branches {
  const T *post_attention_norm, *post_mlp_norm, *apart_q_norm, *apart_k_norm, *attention_norm_bias, *mlp_norm_bias;
  const T* router;                 // panels of router_columns columns: one per expert, padded with zeros to whole panels
  const float* router_bias;        // [num_experts]
  int32_t has_wide_norms;          // query and key norms extend over all heads of a row
  int32_t is_centered;             // LayerNorm, not RMSNorm
  float norm_offset, multiplier;
  Activation activation;
  int32_t is_gated;
  float alpha, limit;
  // A row chooses num_chosen of num_experts; num_shared more experts compute every row. is_renormalised: the weights of the
  // chosen experts sum to 1. has_shared_gate: the router has one more column, the weight of the shared experts.
  int32_t num_experts, num_chosen, num_shared, router_columns, is_renormalised, has_shared_gate;

  Gating gating() const { return {activation, is_gated != 0, alpha, limit}; }
  int64_t num_slots() const { return num_chosen + num_shared; }
};

namespace {

template <typename T>
float norm_factor(const T* x, int64_t size, float epsilon, float mean = 0) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; i++) squares += (load(x[i]) - mean) * (load(x[i]) - mean);
  return 1.0f / std::sqrt(squares / float(size) + epsilon);
}

// out = norm(x) * (weight + offset) + bias: LayerNorm if `is_centered`, else RMSNorm; a copy if there is no weight.
template <typename T>
void norm_rows(const T* x, const T* weight, const T* bias, T* out, int64_t num_rows, int64_t size,
               float epsilon, const Branches<T>& b) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    const T* from = x + row * size;
    T* to = out + row * size;
    if (!weight) {
      std::copy(from, from + size, to);
      continue;
    }
    float sum = 0;
    if (b.is_centered) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < size; i++) sum += load(from[i]);
    }
    const float mean = sum / float(size), factor = norm_factor(from, size, epsilon, mean), offset = b.norm_offset;
    if (bias) {
#pragma omp simd
      for (int64_t i = 0; i < size; i++)
        store(to[i], (load(from[i]) - mean) * factor * (load(weight[i]) + offset) + load(bias[i]));
    } else {
#pragma omp simd
      for (int64_t i = 0; i < size; i++) store(to[i], (load(from[i]) - mean) * factor * (load(weight[i]) + offset));
    }
  }
}

// Norms the first `size` columns of rows in place, in groups of `width`: a head, or all heads. No-op without a weight.
template <typename T>
void norm_heads(T* x, const T* weight, int64_t num_rows, int64_t stride, int64_t size, int64_t width,
                float epsilon, float offset) {
  if (!weight) return;
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    for (T* head = x + row * stride; head < x + row * stride + size; head += width) {
      const float factor = norm_factor(head, width, epsilon);
#pragma omp simd
      for (int64_t i = 0; i < width; i++) store(head[i], load(head[i]) * factor * (load(weight[i]) + offset));
    }
  }
}

// out = residual + multiplier * RMSNorm(branch) * (weight + offset); without a weight, residual + multiplier * branch.
template <typename T>
void add_branch(const T* residual, const T* branch, const T* weight, T* out, int64_t num_rows,
                int64_t size, float epsilon, float offset, float multiplier) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    const T *from = branch + row * size, *base = residual + row * size;
    T* to = out + row * size;
    const float factor = multiplier * (weight ? norm_factor(from, size, epsilon) : 1.0f);
    if (weight) {
#pragma omp simd
      for (int64_t i = 0; i < size; i++) store(to[i], load(base[i]) + load(from[i]) * factor * (load(weight[i]) + offset));
    } else {
#pragma omp simd
      for (int64_t i = 0; i < size; i++) store(to[i], load(base[i]) + load(from[i]) * factor);
    }
  }
}

}  // namespace
