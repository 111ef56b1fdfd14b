// The CPU kernels of int8: decoder layers and the output layer, on the best units of the processor for bytes.
//
// Compiled when a machine first computes a model in int8, see engine/kernels/cpu/native_build.py.

#include "draw.h"
#include "layer.h"
#include "int8/quad_elementwise.h"
#include "int8/quad_rounding.h"

// Layers in int8. The residual stream is in the basis of `spread`; the weights of norms are folded into the products.
struct QuadFormat {
  typedef bf16 Row;
  typedef LayerStep<bf16> Step;
  typedef float Norm;
  typedef int8_t KV;
  typedef QuadWeights Weights;
  static constexpr bool has_branches = false;

  static ByteRows rows(const Step& s) { return {s.bytes, s.scales}; }
  static void norm(const Step& s, const bf16* x, const float* weight, int64_t num_rows, int64_t size, float epsilon) {
    norm_to_bytes(x, weight, rows(s), num_rows, size, epsilon);
  }
  static void project_normed(const Step& s, const Weights& w, bf16* out, int64_t num_rows, int64_t num_columns,
                             int64_t depth, const Gating& gating) {
    project(rows(s), w, nullptr, out, num_rows, num_columns, depth, gating.is_gated);
  }
  static void project_rows(const Step& s, const bf16* x, const Weights& w, const bf16* residual, bf16* out,
                           int64_t num_rows, int64_t num_columns, int64_t depth) {
    spread_to_bytes(x, rows(s), num_rows, depth);
    project(rows(s), w, residual, out, num_rows, num_columns, depth, false);
  }
  static void change_basis(bf16* hidden, int64_t num_rows, int64_t size) {
    spread_rows(hidden, num_rows, size);
  }
};

EXPORT_ATTENTION(bf16, float, int8_t, int8)
EXPORT_LAYERS(QuadFormat, int8)

// Spreads and quantises the input rows of the output layer. bytes: [num_rows rounded up to 32, padded depth].
extern "C" void quantize_int8(const bf16* x, uint8_t* bytes, float* scales, int64_t num_rows, int64_t size) {
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    const float* values = spread_row(x + row * size, size);
    float largest = 0;
    for (int64_t i = 0; i < size; i++) largest = std::max(largest, std::fabs(values[i]));
    scales[row] = to_bytes(values, largest, bytes + row * padded_depth(size), size);
  }
}

// out: [num_ids, depth]: the columns `ids` of the weights, which have been through `spread`.
extern "C" void take_columns_int8(const QuadWeights* weights, const int64_t* ids, bf16* out, int64_t num_ids,
                                  int64_t depth) {
  const int64_t panel_bytes = PANEL * padded_depth(depth);
#pragma omp parallel for
  for (int64_t first = 0; first < num_ids; first += 16) {
    const int64_t count = std::min<int64_t>(16, num_ids - first);
    std::vector<float> columns(depth * 16);
    for (int64_t i = 0; i < count; i++) {
      const int64_t id = ids[first + i];
      const int8_t* from = weights->panels + id / PANEL * panel_bytes + id % PANEL * 4;
      for (int64_t k = 0; k < depth; k++)
        columns[k * 16 + i] = float(from[k / 4 * 4 * PANEL + k % 4]) * weights->scales[id];
    }
    spread_columns_int8(columns.data(), depth, 16, depth);
    for (int64_t i = 0; i < count; i++)
      for (int64_t k = 0; k < depth; k++) store(out[(first + i) * depth + k], columns[k * 16 + i]);
  }
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
