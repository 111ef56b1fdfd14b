// The CPU kernels of decoder layers, for the element types bf16 and float.
//
// Compiled once per machine by engine/kernels/cpu/native_build.py. bf16 products run on AMX tiles if the CPU has them, else
// on AVX-512 vectors of bf16 pairs, else in plain loops that compilers vectorise.

#include "draw.h"
#include "elementwise.h"
#include "experts.h"
#include "float_product.h"
#include "layer.h"
#include "pair_product.h"

// Layers in bf16 or float.
template <typename T>
struct PanelFormat {
  typedef T Row;
  typedef LayerStep<T> Step;
  typedef T Norm;
  typedef T KV;
  static constexpr bool has_branches = true;
  // See pair_product.h and float_product.h.
  struct Weights {
    const T *panels, *bias;
  };

  static void norm(const Step& s, const T* x, const T* weight, int64_t num_rows, int64_t size, float epsilon) {
    rms_norm(x, weight, s.normed, num_rows, size, epsilon);
  }

  static void project_normed(const Step& s, const Weights& w, T* out, int64_t num_rows, int64_t num_columns, int64_t depth,
                             bool is_gated) {
    project(s.normed, w.panels, w.bias, nullptr, out, num_rows, num_columns, depth, swiglu_if(is_gated));
  }

  static void project_rows(const Step&, const T* x, const Weights& w, const T* residual, T* out, int64_t num_rows,
                           int64_t num_columns, int64_t depth) {
    project(x, w.panels, w.bias, residual, out, num_rows, num_columns, depth, Gating{});
  }

  static void project_activated(const Step& s, const Weights& w, T* out, int64_t num_rows, int64_t num_columns,
                                int64_t depth, const Gating& gating) {
    project(s.normed, w.panels, w.bias, nullptr, out, num_rows, num_columns, depth, gating);
  }

  static void route(const Step& s, const Branches<T>& b, int64_t num_rows, int64_t hidden_size) {
    route_rows(s.normed, b, s.expert_rows, num_rows, hidden_size);
  }

  static void project_experts(const T* x, const Weights& w, T* out, int64_t num_columns, int64_t depth,
                              const Gating& gating) {
    ::project_experts(x, w.panels, w.bias, out, num_columns, depth, gating);
  }
};

// Whether the kernels multiply bf16 on this processor; they multiply float32 on every processor.
extern "C" int has_products() { return units_here() != Units::plain; }

// x: [num_rows, depth], allocated for rows rounded up to 32; packed: see pair_product.h; columns and depth are multiples
// of 32.
extern "C" void project_bf16(const bf16* x, const bf16* packed, const bf16* bias, const bf16* residual, bf16* out,
                             int64_t num_rows, int64_t num_columns, int64_t depth, bool is_gated) {
#ifdef HAS_AVX512
  project(x, packed, bias, residual, out, num_rows, num_columns, depth, swiglu_if(is_gated));
#else
  (void)x, (void)packed, (void)bias, (void)residual, (void)out, (void)num_rows, (void)num_columns, (void)depth;
  (void)is_gated;
#endif
}

// The column of the largest product of each row; the products are not stored. allowed: null, or
// [num_rows, num_columns / 32], a bit for each column that may be chosen.
extern "C" void largest_column_bf16(const bf16* x, const bf16* packed, const bf16* bias, const uint32_t* allowed,
                                    int64_t* out, int64_t num_rows, int64_t num_columns, int64_t depth) {
#ifdef HAS_AVX512
  largest_column(x, packed, bias, allowed, out, num_rows, num_columns, depth);
#else
  (void)x, (void)packed, (void)bias, (void)allowed, (void)out, (void)num_rows, (void)num_columns, (void)depth;
#endif
}

// Decoder layers, see layer.h. hidden: [num_rows, hidden_size]; output_rows: null, or the rows that remain at the end.
extern "C" void compute_layers_bf16(const LayerWeights<PanelFormat<bf16>>* weights, int64_t num_layers, const int32_t* operations,
                                    int64_t num_operations, const LayerStep<bf16>* step, bf16* hidden, bf16* const* keys,
                                    bf16* const* values, const int64_t* output_rows, int64_t num_output_rows) {
#ifdef HAS_AVX512
  compute_layers(weights, num_layers, reinterpret_cast<const Operation*>(operations), num_operations, *step, hidden, keys,
                 values, output_rows, num_output_rows);
#else
  (void)weights, (void)num_layers, (void)operations, (void)num_operations, (void)step, (void)hidden, (void)keys;
  (void)values, (void)output_rows, (void)num_output_rows;
#endif
}

// The same for float32.
extern "C" void project_float32(const float* x, const float* packed, const float* bias, const float* residual, float* out,
                                int64_t num_rows, int64_t num_columns, int64_t depth, bool is_gated) {
  project(x, packed, bias, residual, out, num_rows, num_columns, depth, swiglu_if(is_gated));
}

extern "C" void largest_column_float32(const float* x, const float* packed, const float* bias, const uint32_t* allowed,
                                       int64_t* out, int64_t num_rows, int64_t num_columns, int64_t depth) {
  largest_column(x, packed, bias, allowed, out, num_rows, num_columns, depth);
}

extern "C" void compute_layers_float32(const LayerWeights<PanelFormat<float>>* weights, int64_t num_layers,
                                       const int32_t* operations, int64_t num_operations, const LayerStep<float>* step,
                                       float* hidden, float* const* keys, float* const* values, const int64_t* output_rows,
                                       int64_t num_output_rows) {
  compute_layers(weights, num_layers, reinterpret_cast<const Operation*>(operations), num_operations, *step, hidden, keys,
                 values, output_rows, num_output_rows);
}

// logits: [num_rows, size]; out: a token for each row.
extern "C" void draw_tokens(const float* logits, const DrawSettings* settings, int64_t* out, int64_t num_rows,
                            int64_t size) {
  draw(logits, settings, out, num_rows, size);
}

#define EXPORT(T, suffix)                                                                                             \
  extern "C" void attend_##suffix(const T* query, int64_t query_stride, T* out, const T* keys, const T* values,       \
                                  int num_q_heads, int num_kv_heads, int dim, int block_size, float scale,            \
                                  float softcap, int window, const float* sinks, const int64_t* shared,               \
                                  int64_t num_shared, const int64_t* own, int64_t num_own,                            \
                                  const int32_t* prefix_blocks, const int32_t* own_blocks, const int32_t* own_seen,   \
                                  float* state) {                                                                     \
    attend(query, query_stride, out, keys, values, num_q_heads, num_kv_heads, dim, block_size, scale,                 \
           AttentionRule{softcap, window, sinks}, shared, num_shared, own, num_own, prefix_blocks, own_blocks,        \
           own_seen, state);                                                                                          \
  }                                                                                                                   \
  extern "C" void rms_norm_##suffix(const T* x, const T* weight, T* out, int64_t num_rows, int64_t size,              \
                                    float epsilon) {                                                                  \
    rms_norm(x, weight, out, num_rows, size, epsilon);                                                                \
  }                                                                                                                   \
  extern "C" void rotate_and_store_##suffix(T* qkv, const float* cos, const float* sin, const T* q_norm,              \
                                            const T* k_norm, float epsilon, const int64_t* slots, T* keys, T* values, \
                                            int64_t num_rows, int num_q_heads, int num_kv_heads, int dim,             \
                                            int block_size) {                                                         \
    rotate_and_store(qkv, cos, sin, q_norm, k_norm, epsilon, slots, keys, values, num_rows, num_q_heads,              \
                     num_kv_heads, dim, block_size);                                                                  \
  }                                                                                                                   \
  extern "C" void swiglu_##suffix(const T* gate_up, T* out, int64_t num_rows, int64_t size) {                         \
    swiglu(gate_up, out, num_rows, size);                                                                             \
  }

EXPORT(bf16, bf16)
EXPORT(float, float32)
