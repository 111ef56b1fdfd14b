// Linear layers in int8: rows of bytes times packed bytes in 32-bit sums, then scales, bias, and residual stream or SwiGLU.
#pragma once

#include "../product.h"
#include "quads.h"

// The weights of a linear layer, made by engine/kernels/cpu/int8_weights.py. A panel of 32 columns has the layout
// [quads of depth][32 columns][4], with the depth padded with zeros to a multiple of ALIGNED_DEPTH.
struct QuadWeights {
  const int8_t* panels;
  const int32_t* offsets;  // [columns]: -128 times the sum of a column, because rows of x have 128 added
  const float* scales;     // [columns]
  const float* bias;       // [columns], or null
};

// The input of products: unsigned bytes [rows, padded depth], where 128 is zero, and a scale per row.
struct ByteRows {
  uint8_t* bytes;
  float* scales;
};

namespace {

inline int64_t padded_depth(int64_t depth) { return round_up(depth, ALIGNED_DEPTH); }

struct QuadOperands {
  typedef int32_t Sum;
  static constexpr bool has_shared_panels = true, has_tiles = true;
  const uint8_t* x;
  const int8_t* panels;
  const QuadWeights& weights;
  int64_t row_bytes;

  QuadOperands(const uint8_t* x, const QuadWeights& weights, int64_t depth)
      : x(x), panels(weights.panels), weights(weights), row_bytes(padded_depth(depth)) {}

#ifdef HAS_AMX
  void begin_tiles(int64_t panel) const {
    const int32_t* offsets = weights.offsets + panel * PANEL;
    _tile_loadd(0, offsets, 0);  // the same in all rows
    _tile_loadd(1, offsets + 16, 0);
    _tile_loadd(2, offsets, 0);
    _tile_loadd(3, offsets + 16, 0);
  }

  static void multiply_tiles() {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
#endif

  // block[r][c] (32 x 32) = the first `count` of 32 rows of x times one panel.
  void multiply_vectors(int64_t first_row, int64_t panel, int32_t* block, int count) const {
    const uint8_t* from = x + first_row * row_bytes;
    const int8_t* panel_columns = panels + panel * PANEL * row_bytes;
    const int32_t* panel_offsets = weights.offsets + panel * PANEL;
    const int64_t size = row_bytes;
    for (int line = 0; line < 2; line++) {
      __builtin_prefetch(weights.scales + (panel + 1) * PANEL + 16 * line, 0, 3);
      __builtin_prefetch(weights.offsets + (panel + 1) * PANEL + 16 * line, 0, 3);
    }
    for (int half = 0; half < 2; half += QUAD_HALVES) {
      const int8_t* columns = panel_columns + half * 64;
      const int32_t* offsets = panel_offsets + half * 16;
      by_rows<QUAD_ROWS>(count, [=](auto rows, int first) {
        const uint8_t* const at = from + first * size;
        int32_t* const to = block + first * PANEL + half * 16;
        if constexpr (rows == 8 || REGISTER < 16)
          multiply_apart<rows>(at, columns, offsets, size, to);
        else
          multiply_rows<rows>(at, columns, offsets, size, to);
      });
    }
  }

  template <int R>
  __attribute__((always_inline)) static void multiply_rows(const uint8_t* from, const int8_t* columns, const int32_t* offsets,
                                                           int64_t size, int32_t* to) {
    QuadSums<R, QUAD_HALVES> sums;
    sums.fill_rows(offsets);
    constexpr int64_t ahead = R == 8 ? 2 * AHEAD_BYTES : AHEAD_BYTES;
    for (int64_t k = 0; k < size; k += 4) {
      const int8_t* quads = columns + k * PANEL;
      __builtin_prefetch(quads + ahead, 0, 2);
      if (QUAD_HALVES == 2) __builtin_prefetch(quads + ahead + 64, 0, 2);
      sums.add(from + k, size, quads, 64);
    }
    sums.store(to, PANEL);
  }

  // Not inlined: see PairOperands, and in registers of fewer than 16 sums g++ keeps sums in memory if this is inlined.
  template <int R>
  __attribute__((noinline)) static void multiply_apart(const uint8_t* from, const int8_t* columns, const int32_t* offsets,
                                                       int64_t size, int32_t* to) {
    multiply_rows<R>(from, columns, offsets, size, to);
  }
};

// The values of integer sums, for as many columns as a Vector holds: scaled, plus bias.
template <typename Vector>
inline Vector scaled(const int32_t* sums, const QuadWeights& weights, int64_t column, float row_scale) {
  const auto whole = load_as<decltype(Vector() < Vector())>(sums);
  const Vector x = __builtin_convertvector(whole, Vector) * load_as<Vector>(weights.scales + column) * row_scale;
  return weights.bias ? x + load_as<Vector>(weights.bias + column) : x;
}

inline Floats silu_floats(Floats x) {
  const Floats one = Floats{} + 1.0f, e = exp2_floats((x < 0 ? x : -x) * LOG2E), sum = e + one;  // exp(-|x|)
  // 1 / sum by Newton's method, relative error about 1e-5: a division would take longer than all other operations here.
  Floats inverse = fused_floats(sum, Floats{} - 8.0f / 17.0f, Floats{} + 24.0f / 17.0f);
  for (int i = 0; i < 2; i++) inverse = fused_floats(inverse, fused_floats(-sum, inverse, one), inverse);
  return x * (x < 0 ? e : one) * inverse;
}

// Finishes a row of sums for one panel, see pair_product.h. T: type of the output.
template <typename T>
struct QuadsToOutput {
  const QuadWeights& weights;
  const float* row_scales;
  const bf16* residual;
  T* out;
  int64_t num_columns;  // of the output and of the residual
  bool is_gated;

  bool needs(int64_t, int, int64_t) const { return true; }

  void operator()(const int32_t* sums, int64_t row, int64_t panel) const {
    for (int i = 0; i < 16; i += FLOATS) {
      const int64_t column = panel * PANEL + i, at = row * num_columns + column;
      Floats low = scaled<Floats>(sums + i, weights, column, row_scales[row]);
      Floats high = scaled<Floats>(sums + i + 16, weights, column + 16, row_scales[row]);
      if (is_gated) {
        store_floats(out + row * num_columns + panel * 16 + i, silu_floats(low) * high);
        continue;
      }
      if (residual) low += load_floats(residual + at), high += load_floats(residual + at + 16);
      store_apart(out + at, low, high);
    }
  }
};

// The Values of `ToLargest`.
struct ScaledSums {
  const QuadWeights& weights;
  const float* row_scales;

  Lanes operator()(const int32_t* sums, int64_t row, int64_t column) const {
    return scaled<Lanes>(sums, weights, column, row_scales[row]);
  }
};

// out = x times weights, + bias, + residual; or silu(gate) * up for gated panels.
template <typename T>
void project(const ByteRows& x, const QuadWeights& weights, const bf16* residual, T* out, int64_t num_rows,
             int64_t num_columns, int64_t depth, bool is_gated) {
  const int64_t out_columns = is_gated ? num_columns / 2 : num_columns;
  multiply(QuadOperands(x.bytes, weights, depth), num_rows, num_columns,
           QuadsToOutput<T>{weights, x.scales, residual, out, out_columns, is_gated});
}
}  // namespace
