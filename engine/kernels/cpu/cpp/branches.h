// What decoder layers of some families compute between their products besides: norms with an offset or of all heads, sums
// with a branch, GELU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "number.h"

namespace {

inline float norm_factor(const bf16* x, int64_t size, float epsilon) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; i++) squares += load(x[i]) * load(x[i]);
  return 1.0f / std::sqrt(squares / float(size) + epsilon);
}

// out = RMSNorm(x) * (weight + offset); without a weight a copy.
inline void norm_rows(const bf16* x, const bf16* weight, bf16* out, int64_t num_rows, int64_t size, float epsilon,
                      float offset) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    const bf16* from = x + row * size;
    bf16* to = out + row * size;
    if (!weight) {
      std::copy(from, from + size, to);
      continue;
    }
    const float factor = norm_factor(from, size, epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) store(to[i], load(from[i]) * factor * (load(weight[i]) + offset));
  }
}

// Norms the first `size` columns of rows in place, `width` columns at a time: a head, or all of them. Nothing without a weight.
inline void norm_heads(bf16* x, const bf16* weight, int64_t num_rows, int64_t stride, int64_t size, int64_t width,
                       float epsilon, float offset) {
  if (!weight) return;
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    for (bf16* head = x + row * stride; head < x + row * stride + size; head += width) {
      const float factor = norm_factor(head, width, epsilon);
#pragma omp simd
      for (int64_t i = 0; i < width; i++) store(head[i], load(head[i]) * factor * (load(weight[i]) + offset));
    }
  }
}

// out = residual + multiplier * RMSNorm(branch) * (weight + offset); without a weight, of the branch itself.
inline void add_branch(const bf16* residual, const bf16* branch, const bf16* weight, bf16* out, int64_t num_rows,
                       int64_t size, float epsilon, float offset, float multiplier) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    const bf16 *from = branch + row * size, *base = residual + row * size;
    bf16* to = out + row * size;
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

// gelu(gate) * up, from rows [gate | up]; GELU with tanh, which is x times the logistic function of 2 u.
inline void gate_by_gelu(const bf16* gate_up, bf16* out, int64_t num_rows, int64_t size) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    const bf16 *gate = gate_up + row * 2 * size, *up = gate + size;
    bf16* to = out + row * size;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      const float x = load(gate[i]), u = 0.79788456f * (x + 0.044715f * x * x * x);
      const float e = exp2_negative(-2 * std::fabs(u) * LOG2E);
      store(to[i], x * (u < 0 ? e : 1.0f) / (1.0f + e) * load(up[i]));
    }
  }
}

}  // namespace
