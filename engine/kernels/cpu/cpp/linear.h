// Linear layers of rows in bf16 or float32, with weights of any format, and the decoder layers that consist of them.
#pragma once
#include "elementwise.h"
#include "experts.h"
#include "float_product.h"
#include "layer.h"
#include "pair_product.h"

namespace {

template <typename T, typename Finish>
void multiply_all(const T* x, const PanelWeights<T>& weights, int64_t num_rows, int64_t num_columns, int64_t depth,
                  const Finish& finish) {
  multiply(typename PanelProduct<T>::Operands(x, weights.panels, depth), num_rows, num_columns, finish);
}

// out = x times weights, + bias, activated, + residual. x: allocated for rows rounded up to 32; columns and depth are
// multiples of 32.
template <typename T, typename Weights>
void project(const T* x, const Weights& weights, const T* residual, T* out, int64_t num_rows, int64_t num_columns,
             int64_t depth, const Gating& gating) {
  const int64_t out_columns = gating.is_gated ? num_columns / 2 : num_columns;
  with_finish(typename PanelProduct<T>::Finish{weights.bias, residual, out, out_columns, gating},
              [&](const auto& finish) { multiply_all(x, weights, num_rows, num_columns, depth, finish); });
}

// out[row] = the arg max of x times weights, + bias, over the allowed columns; the lowest column on ties. The products are
// not stored. allowed: null, or [num_rows, num_columns / 32], a bit for each column that may be chosen.
template <typename T, typename Weights>
void largest_column(const T* x, const Weights& weights, const uint32_t* allowed, int64_t* out, int64_t num_rows,
                    int64_t num_columns, int64_t depth) {
  find_largest(allowed, out, num_rows, num_columns, AddBias<T>{weights.bias},
               [&](const auto& finish) { multiply_all(x, weights, num_rows, num_columns, depth, finish); });
}

// out = sorted rows of x times their expert's weights, + bias, activated.
template <typename T, typename Weights>
void project_experts(const T* x, const Weights& weights, T* out, int64_t num_columns, int64_t depth, const Gating& gating) {
  typedef typename PanelProduct<T>::Finish Finish;
  const int64_t out_columns = gating.is_gated ? num_columns / 2 : num_columns;
  multiply_experts(x, weights, num_columns, depth,
                   ExpertsToOutput<Finish>{{weights.bias, nullptr, out, out_columns, gating},
                                           current_routing().expert_of.data(), num_columns});
}

// Layers whose rows, norms and KV are of type T.
template <typename T, typename W>
struct LinearFormat {
  typedef T Row;
  typedef T Norm;
  typedef T KV;
  typedef W Weights;
  static constexpr bool has_branches = true;

  static void norm(const LayerStep<T>& s, const T* x, const T* weight, int64_t num_rows, int64_t size, float epsilon) {
    rms_norm(x, weight, s.normed, num_rows, size, epsilon);
  }
  static void norm_in_place(T* x, const T* weight, int64_t num_rows, int64_t size, float epsilon) {
    rms_norm(x, weight, x, num_rows, size, epsilon);
  }
  static void project_normed(const LayerStep<T>& s, const W& w, T* out, int64_t num_rows, int64_t num_columns, int64_t depth,
                             const Gating& gating) {
    project(s.normed, w, static_cast<const T*>(nullptr), out, num_rows, num_columns, depth, gating);
  }
  static void project_rows(const LayerStep<T>&, const T* x, const W& w, const T* residual, T* out, int64_t num_rows,
                           int64_t num_columns, int64_t depth) {
    project(x, w, residual, out, num_rows, num_columns, depth, Gating{});
  }
};

}  // namespace

// The functions of linear layers that Python calls.
#define EXPORT_LINEAR(T, Weights, suffix)                                                                               \
  extern "C" void project_##suffix(const T* x, const Weights* weights, const T* residual, T* out, int64_t num_rows,     \
                                   int64_t num_columns, int64_t depth, bool is_gated) {                                 \
    project(x, *weights, residual, out, num_rows, num_columns, depth, swiglu_if(is_gated));                             \
  }                                                                                                                     \
  extern "C" void largest_column_##suffix(const T* x, const Weights* weights, const uint32_t* allowed, int64_t* out,    \
                                          int64_t num_rows, int64_t num_columns, int64_t depth) {                       \
    largest_column(x, *weights, allowed, out, num_rows, num_columns, depth);                                            \
  }
