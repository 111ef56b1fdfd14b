// Linear layers in float32, on the widest vectors of the processor, then bias, activation and residual stream.
#pragma once

#include "activation.h"
#include "product.h"
#include "rows.h"

namespace {

// Rows whose sums, by two vectors, fit the registers with their operands.
#if defined(__AVX512F__) && !defined(NO_VECTORS)
constexpr int FLOAT_ROWS = 12;
#elif defined(__aarch64__)
constexpr int FLOAT_ROWS = 8;
#else
constexpr int FLOAT_ROWS = 4;
#endif

// A sum is split into parts of at most so many terms, which are then added: this rounds less than one long sum.
constexpr int64_t FLOAT_TERMS = 512;

// Rows of x [rows, depth] and panels [depth][32 columns].
struct FloatOperands {
  typedef float Sum;
  static constexpr bool has_shared_panels = true, has_tiles = false;
  const float *x, *panels;
  int64_t depth, row_bytes;

  FloatOperands(const float* x, const float* panels, int64_t depth)
      : x(x), panels(panels), depth(depth), row_bytes(depth * int64_t(sizeof(float))) {}

  // See PairOperands.
  void multiply_vectors(int64_t first_row, int64_t panel, float* block, int count) const {
    const float *from = x + first_row * depth, *columns = panels + panel * PANEL * depth;
    const int64_t num_parts = divide_up(depth, FLOAT_TERMS);
    std::fill(block, block + round_up(count, 4) * PANEL, 0.0f);
    for (int64_t part = 0; part < num_parts; part++) {
      const int64_t begin = part_start(depth, num_parts, part), end = part_start(depth, num_parts, part + 1);
      by_rows<FLOAT_ROWS>(count, [=](auto rows, int first) {
        add_terms<rows>(from + first * depth, columns, begin, end, block + first * PANEL);
      });
    }
  }

  // to[r][c] += the terms [begin, end) of R rows times one panel. Not inlined: inlining makes it 10 % slower.
  template <int R>
  __attribute__((noinline)) void add_terms(const float* rows, const float* columns, int64_t begin, int64_t end, float* to) const {
    const int64_t stride = depth;
    for (int column = 0; column < PANEL; column += 2 * FLOATS) {
      Floats sums[2][R] = {};
      for (int64_t k = begin; k < end; k++) {
        const float* at = columns + k * PANEL + column;
        for (int line = 0; line < 2 * FLOATS; line += 16)
          __builtin_prefetch(reinterpret_cast<const char*>(at + line) + AHEAD_BYTES, 0, 2);
        const Floats low = load_floats(at), high = load_floats(at + FLOATS);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) sums[0][r] += low * rows[r * stride + k], sums[1][r] += high * rows[r * stride + k];
      }
      for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
          float* const at = to + r * PANEL + column + half * FLOATS;
          const Floats after = load_floats(at) + sums[half][r];
          std::memcpy(at, &after, sizeof after);
        }
    }
  }
};

// Finishes a row of sums for one panel: bias, activation, residual stream.
struct ToFloats {
  const float *bias, *residual;
  float* out;
  int64_t num_columns;  // of the output and of the residual
  Gating gating;

  bool needs(int64_t, int, int64_t) const { return true; }

  void operator()(const float* sums, int64_t row, int64_t panel) const {
    const int64_t column = panel * PANEL, at = row * num_columns + column;
    float values[PANEL];
    for (int i = 0; i < PANEL; i++) values[i] = sums[i] + (bias ? bias[column + i] : 0.0f);
    if (gating.is_gated) {
      activate_gated(values, values + PANEL / 2, out + row * num_columns + panel * (PANEL / 2), PANEL / 2, gating);
      return;
    }
    activate(values, PANEL, gating);
    for (int i = 0; i < PANEL; i++) out[at + i] = values[i] + (residual ? residual[at + i] : 0.0f);
  }
};

// Calls f with the same; see pair_product.h.
template <typename F>
void with_finish(const ToFloats& to, const F& f) {
  f(to);
}

template <>
struct PanelProduct<float> {
  typedef FloatOperands Operands;
  typedef ToFloats Finish;
};

}  // namespace
