// Activation and gating of a feed-forward's first product.
#pragma once

#include "number.h"

namespace {

// engine/kernels/cpu/branched_layers.py has the same numbers. `clamped` is gpt-oss's.
enum class Activation : int32_t { none = 0, silu = 1, gelu_tanh = 2, gelu = 3, clamped = 4 };

struct Gating {
  Activation activation = Activation::none;
  bool is_gated = false;          // a panel holds 16 columns of the gate, then the same 16 columns of up
  float alpha = 0, limit = 0;     // of `clamped`
};

inline Gating swiglu_if(bool is_gated) {
  return is_gated ? Gating{Activation::silu, true} : Gating{};
}

#ifdef HAS_AVX512
// x / (1 + exp(-factor x)), relative error about 6e-5; silu with a factor of 1.
inline __m512 gate_16(__m512 x, float factor = 1) {
  const __m512 e = exp2_16(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2E * factor)));
  return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(e, _mm512_set1_ps(1.0f))));
}

// GELU's tanh approximation: x times the logistic function of 2 u.
inline __m512 gelu_tanh_16(__m512 x) {
  const __m512 cubed = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 u = _mm512_fmadd_ps(cubed, _mm512_set1_ps(0.044715f), x);
  const __m512 e = exp2_16(_mm512_mul_ps(u, _mm512_set1_ps(-2 * 0.79788456f * LOG2E)));
  return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(e, _mm512_set1_ps(1.0f))));
}

// GELU with erf(y), y = |x| / sqrt(2): 1 - (a1 t + ... + a5 t^5) exp(-y^2), t = 1 / (1 + 0.3275911 y); absolute error of erf
// 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline __m512 gelu_16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), y = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678f));
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(y, _mm512_set1_ps(0.3275911f), one));
  __m512 p = _mm512_set1_ps(1.061405429f);
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
  const __m512 rest = _mm512_mul_ps(_mm512_mul_ps(p, t), exp2_16(_mm512_mul_ps(_mm512_mul_ps(y, y), _mm512_set1_ps(-LOG2E))));
  const __mmask16 is_negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 twice = _mm512_mask_blend_ps(is_negative, _mm512_sub_ps(_mm512_set1_ps(2.0f), rest), rest);
  return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), twice);
}

inline __m512 activate_16(__m512 x, const Gating& gating) {
  switch (gating.activation) {
    case Activation::silu: return gate_16(x);
    case Activation::gelu_tanh: return gelu_tanh_16(x);
    case Activation::gelu: return gelu_16(x);
    case Activation::clamped: return gate_16(_mm512_min_ps(x, _mm512_set1_ps(gating.limit)), gating.alpha);
    default: return x;
  }
}

// The factor that the activated gate is multiplied with: up, or for `clamped` up within the limit, plus 1.
inline __m512 gated_16(__m512 up, const Gating& gating) {
  if (gating.activation != Activation::clamped) return up;
  const __m512 limit = _mm512_set1_ps(gating.limit);
  const __m512 clamped = _mm512_max_ps(_mm512_min_ps(up, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
  return _mm512_add_ps(clamped, _mm512_set1_ps(1.0f));
}
#endif

// The logistic function.
inline float logistic(float x) {
  const float e = exp2_negative(-std::fabs(x) * LOG2E);  // exp(-|x|)
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// As gelu_tanh_16 and gelu_16, with the float32 exponential.
inline float gelu_tanh(float x) { return x * logistic(2 * 0.79788456f * (x + 0.044715f * x * x * x)); }

inline float gelu(float x) {
  const float y = std::fabs(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * y);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float rest = p * t * exp2_negative(-y * y * LOG2E);
  return x * 0.5f * (x < 0 ? rest : 2.0f - rest);
}

// Activates `count` values in place.
inline void activate(float* values, int count, const Gating& gating) {
  const auto each = [=](auto function) {
#pragma omp simd
    for (int i = 0; i < count; i++) values[i] = function(values[i]);
  };
  const float alpha = gating.alpha, limit = gating.limit;
  switch (gating.activation) {
    case Activation::silu: return each([](float x) { return silu(x); });
    case Activation::gelu_tanh: return each([](float x) { return gelu_tanh(x); });
    case Activation::gelu: return each([](float x) { return gelu(x); });
    case Activation::clamped: return each([=](float x) { return std::min(x, limit) * logistic(alpha * std::min(x, limit)); });
    default: return;
  }
}

// out = the activated gate times the factor of `gated_16`, for `count` columns. gate: overwritten.
inline void activate_gated(float* gate, const float* up, float* out, int count, const Gating& gating) {
  activate(gate, count, gating);
  if (gating.activation == Activation::clamped) {
#pragma omp simd
    for (int i = 0; i < count; i++) out[i] = gate[i] * (std::max(std::min(up[i], gating.limit), -gating.limit) + 1.0f);
  } else {
    for (int i = 0; i < count; i++) out[i] = gate[i] * up[i];
  }
}

}  // namespace
