// The CPU kernels of quantized weights: decoder layers, the output layer and embeddings, computed as in bf16 or float32.
//
// Compiled when a machine first loads such a model. See engine/kernels/cpu/native_build.py.

#include "elementwise.h"
#include "layer.h"
#include "quantized/quantized_product.h"
#include "quantized/repack.h"

// Layers whose weights are quantized.
struct QuantizedFormat {
  typedef Element Row;
  typedef LayerStep<Element> Step;
  typedef Element Norm;
  typedef Element KV;
  typedef QuantizedWeights Weights;
  static constexpr bool has_branches = true;

  static void norm(const Step& s, const Element* x, const Element* weight, int64_t num_rows, int64_t size, float epsilon) {
    rms_norm(x, weight, s.normed, num_rows, size, epsilon);
  }

  static void project_normed(const Step& s, const Weights& w, Element* out, int64_t num_rows, int64_t num_columns,
                             int64_t depth, bool is_gated) {
    project(s.normed, w, nullptr, out, num_rows, num_columns, depth, swiglu_if(is_gated));
  }

  static void project_rows(const Step&, const Element* x, const Weights& w, const Element* residual, Element* out,
                           int64_t num_rows, int64_t num_columns, int64_t depth) {
    project(x, w, residual, out, num_rows, num_columns, depth, Gating{});
  }

  static void project_activated(const Step& s, const Weights& w, Element* out, int64_t num_rows, int64_t num_columns,
                                int64_t depth, const Gating& gating) {
    project(s.normed, w, nullptr, out, num_rows, num_columns, depth, gating);
  }

  static void route(const Step& s, const Branches<Element>& b, int64_t num_rows, int64_t hidden_size) {
    route_rows(s.normed, b, s.expert_rows, num_rows, hidden_size);
  }

  static void project_experts(const Element* x, const Weights& w, Element* out, int64_t num_columns, int64_t depth,
                              const Gating& gating) {
    ::project_experts(x, w, out, num_columns, depth, gating);
  }
};

// Bytes of an `Element`.
extern "C" int element_bytes_quantized() { return int(sizeof(Element)); }

// Decoder layers, see layer.h. hidden: [num_rows, hidden_size]; output_rows: null, or the rows that remain at the end.
extern "C" void compute_layers_quantized(const LayerWeights<QuantizedFormat>* weights, int64_t num_layers,
                                         const int32_t* operations, int64_t num_operations, const LayerStep<Element>* step,
                                         Element* hidden, Element* const* keys, Element* const* values,
                                         const int64_t* output_rows, int64_t num_output_rows) {
  compute_layers(weights, num_layers, reinterpret_cast<const Operation*>(operations), num_operations, *step, hidden, keys,
                 values, output_rows, num_output_rows);
}

// x: [num_rows, depth], allocated for rows rounded up to 32; columns are a multiple of 32.
extern "C" void project_quantized(const Element* x, const HalfPanel* halves, const Element* bias, Element* out,
                                  int64_t num_rows, int64_t num_columns, int64_t depth) {
  project(x, {halves, bias}, nullptr, out, num_rows, num_columns, depth, Gating{});
}

// See `largest_column_bf16` in native.cpp.
extern "C" void largest_column_quantized(const Element* x, const HalfPanel* halves, const Element* bias, const uint32_t* allowed,
                                         int64_t* out, int64_t num_rows, int64_t num_columns, int64_t depth) {
  largest_column(x, {halves, bias}, allowed, out, num_rows, num_columns, depth);
}

// out: [num_ids, depth], the weights of the columns `ids`.
extern "C" void columns_quantized(const HalfPanel* halves, const int64_t* ids, Element* out, int64_t num_ids, int64_t depth) {
#pragma omp parallel for
  for (int64_t i = 0; i < num_ids; i++) {
    Element* words = panel_buffer(HALF * depth);
    unpack(halves[ids[i] / HALF], depth, words, HALF);
    for (int64_t k = 0; k < depth; k += WORD)
      std::memcpy(static_cast<void*>(out + i * depth + k), words + k * HALF + ids[i] % HALF * WORD, 4);
  }
}

// Repacks rows of a file's tensor as half panels. rows: [16 num_halves], the row of each column, -1 for a column of zeros.
extern "C" void repack_quantized(int64_t kind, const uint8_t* tensor, int64_t row_bytes, const int64_t* rows, uint8_t* out,
                                 int64_t half_bytes, int64_t num_halves, int64_t depth) {
#pragma omp parallel for
  for (int64_t i = 0; i < num_halves; i++) {
    const uint8_t* columns[HALF];
    for (int c = 0; c < HALF; c++) {
      const int64_t row = rows[i * HALF + c];
      columns[c] = row < 0 ? nullptr : tensor + row * row_bytes;
    }
    repack(kind, columns, depth, out + i * half_bytes);
  }
}

// The same for codes [16 num_halves, depth] with scales and zeros [16 num_halves, depth / group]; zeros may be null.
extern "C" void repack_codes_quantized(int64_t kind, const uint8_t* codes, const uint16_t* scales, const uint8_t* zeros,
                                       int64_t group, uint8_t* out, int64_t half_bytes, int64_t num_halves, int64_t depth) {
#pragma omp parallel for
  for (int64_t i = 0; i < num_halves; i++) {
    const int64_t first = i * HALF, at = first * (depth / group);
    repack_codes(kind, codes + first * depth, scales + at, zeros ? zeros + at : nullptr, group, depth, out + i * half_bytes);
  }
}
