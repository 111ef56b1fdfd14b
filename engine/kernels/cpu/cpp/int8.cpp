// The CPU kernels of int8: decoder layers and the output layer, on the best units of the processor for bytes.
//
// Compiled when a machine first computes a model in int8, see engine/kernels/cpu/native_build.py.

#include "draw.h"
#include "layer.h"
#include "int8/quad_elementwise.h"
#include "int8/quad_rounding.h"

// Layers in int8. The weights of norms are folded into the products; a norm multiplies by the factors of input channels
// (engine/kernels/cpu/int8_weights.py).
struct QuadFormat {
  typedef bf16 Row;
  typedef LayerStep<bf16> Step;
  typedef float Norm;
  typedef int8_t KV;
  typedef QuadWeights Weights;
  static constexpr bool has_branches = false;

  static ByteRows rows(const Step& s) { return {s.bytes, s.scales}; }
  static void norm(const Step& s, const bf16* x, const float* factors, int64_t num_rows, int64_t size, float epsilon) {
    norm_to_bytes(x, factors, rows(s), num_rows, size, epsilon);
  }
  static void norm_in_place(bf16* x, const float* weight, int64_t num_rows, int64_t size, float epsilon) {
#pragma omp parallel for
    for (int64_t row = 0; row < num_rows; row++) {
      bf16* const to = x + row * size;
      const float factor = inverse_rms(to, size, epsilon);
      for (int64_t i = 0; i < size; i += 16) store_lanes(to + i, load_lanes(to + i) * factor * load_lanes(weight + i));
    }
  }
  static void project_normed(const Step& s, const Weights& w, bf16* out, int64_t num_rows, int64_t num_columns,
                             int64_t depth, const Gating& gating) {
    project(rows(s), w, nullptr, out, num_rows, num_columns, depth, gating.is_gated);
  }
  static void project_rows(const Step& s, const bf16* x, const Weights& w, const bf16* residual, bf16* out,
                           int64_t num_rows, int64_t num_columns, int64_t depth) {
    const auto values = [=](int64_t row) { return [=](int64_t i) { return load_lanes(x + row * depth + i); }; };
    spread_to_bytes(values, rows(s), num_rows, depth);
    project(rows(s), w, residual, out, num_rows, num_columns, depth, false);
  }
};

EXPORT_ATTENTION(bf16, float, int8_t, int8)
EXPORT_LAYERS(QuadFormat, int8)

// Converts the input rows of the output layer to bytes, times a factor for each column. bytes: [num_rows rounded up to 32,
// padded depth].
extern "C" void quantize_int8(const bf16* x, const float* factors, uint8_t* bytes, float* scales, int64_t num_rows,
                              int64_t size) {
  const auto values = [=](int64_t row) {
    return [=](int64_t i) { return load_lanes(x + row * size + i) * load_lanes(factors + i); };
  };
  spread_to_bytes(values, {bytes, scales}, num_rows, size);
}

// out: [num_ids, depth]: the columns `ids` of the weights, which are spread back and multiplied by the factors.
extern "C" void take_columns_int8(const QuadWeights* weights, const float* factors, const int64_t* ids, bf16* out,
                                  int64_t num_ids, int64_t depth) {
  const int64_t panel_bytes = PANEL * padded_depth(depth);
  by_group(depth, [&](auto group) {
#pragma omp parallel for
    for (int64_t i = 0; i < num_ids; i++) {
      const int8_t* from = weights->panels + ids[i] / PANEL * panel_bytes + ids[i] % PANEL * 4;
      float* column = row_buffer(depth);
      for (int64_t k = 0; k < depth; k++)
        column[k] = float(from[k / 4 * 4 * PANEL + k % 4]) * weights->scales[ids[i]];
      spread_groups<group>([=](int64_t k) { return load_lanes(column + k); }, column, depth);
      for (int64_t k = 0; k < depth; k++) store(out[i * depth + k], column[k] * factors[k]);
    }
  });
}

// out: float [num_rows, num_columns]; columns are a multiple of 32.
extern "C" void project_int8(const uint8_t* bytes, float* row_scales, const QuadWeights* weights, float* out,
                             int64_t num_rows, int64_t num_columns, int64_t depth) {
  project({const_cast<uint8_t*>(bytes), row_scales}, *weights, nullptr, out, num_rows, num_columns, depth, false);
}

// The column of the largest product of each row, plus bias, the lowest on ties; the products are not stored. allowed: null,
// or [num_rows, num_columns / 32], a bit for each column that may be chosen.
extern "C" void largest_column_int8(const uint8_t* bytes, const float* row_scales, const QuadWeights* weights,
                                    const uint32_t* allowed, int64_t* out, int64_t num_rows, int64_t num_columns,
                                     int64_t depth) {
  find_largest(allowed, out, num_rows, num_columns, ScaledSums{*weights, row_scales}, [&](const auto& finish) {
    multiply(QuadOperands(bytes, *weights, depth), num_rows, num_columns, finish);
  });
}
