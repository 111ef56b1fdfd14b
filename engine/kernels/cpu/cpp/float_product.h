// Linear layers in float32, and in bf16 on processors that do not multiply it, on the widest vectors of the processor, then
// bias, activation and residual stream.
#pragma once

#include "activation.h"
#include "product.h"
#include "rows.h"

namespace {

// A sum is split into parts of at most so many terms, which are then added: this rounds less than one long sum.
constexpr int64_t FLOAT_TERMS = 512;

// Number i of every word: see FloatOperands.
template <typename T>
inline Floats number_of(Words words, int64_t i) {
  if (sizeof(T) == 4) return Floats(words);
  return Floats(i == 0 ? words << 16 : words & 0xffff0000);
}

// Rows of x [rows, depth] and panels of words, see word_index. A word is a float, or a pair of bf16, whose products are those
// of the same numbers in float32. Columns that a loop reads are stored together: with others between them they would occupy
// half of the first-level cache's sets.
template <typename T>
struct FloatOperands {
  typedef float Sum;
  static constexpr bool has_shared_panels = true, has_tiles = false;
  static constexpr int TOGETHER = FLOATS < 16 ? 16 : PANEL;
  static constexpr int64_t WORD = 4 / sizeof(T);
  const T *x, *panels;
  int64_t depth, row_bytes;

  FloatOperands(const T* x, const T* panels, int64_t depth)
      : x(x), panels(panels), depth(depth), row_bytes(depth * int64_t(sizeof(T))) {}

  // See PairOperands.
  void multiply_vectors(int64_t first_row, int64_t panel, float* block, int count) const {
    const T *from = x + first_row * depth, *columns = panels + panel * PANEL * depth;
    const int64_t num_parts = divide_up(depth, FLOAT_TERMS), num_words = depth / WORD;
    std::fill(block, block + round_up(count, 4) * PANEL, 0.0f);
    for (int64_t part = 0; part < num_parts; part++) {
      const int64_t begin = part_start(num_words, num_parts, part), end = part_start(num_words, num_parts, part + 1);
      by_rows<FLOAT_ROWS>(count, [=](auto rows, int first) {
        float memory[rows * FLOAT_TERMS];
        int64_t stride = depth;
        const float* const x = as_floats(from + first * depth + begin * WORD, rows, (end - begin) * WORD, stride, memory);
        add_terms<rows>(x, stride, columns, begin, end, num_words, block + first * PANEL);
      });
    }
  }

  // to[r][c] += the words [begin, end) of a panel times R rows, which begin with word `begin`. Not inlined: inlining makes it
  // 10 % slower.
  template <int R>
  __attribute__((noinline)) static void add_terms(const float* rows, int64_t stride, const T* columns, int64_t begin,
                                                  int64_t end, int64_t num_words, float* to) {
    for (int column = 0; column < PANEL; column += 2 * FLOATS) {
      Floats sums[2][R] = {};
      const float* row = rows;
      const T* at = columns + word_index(TOGETHER, column, begin, num_words) * WORD;
      for (int64_t k = begin; k < end; k++, row += WORD, at += TOGETHER * WORD) {
        for (int line = 0; line < 2 * FLOATS; line += 16)
          __builtin_prefetch(reinterpret_cast<const char*>(at + line * WORD) + AHEAD_BYTES, 0, 2);
#pragma GCC unroll 2
        for (int64_t i = 0; i < WORD; i++) {
          Floats low = number_of<T>(load_as<Words>(at), i), high = number_of<T>(load_as<Words>(at + FLOATS * WORD), i);
          keep_in_registers(low, high);
#pragma GCC unroll 12
          for (int r = 0; r < R; r++) sums[0][r] += low * row[r * stride + i], sums[1][r] += high * row[r * stride + i];
        }
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
template <typename T>
struct ToRows {
  const T *bias, *residual;
  T* out;
  int64_t num_columns;  // of the output and of the residual
  Gating gating;

  bool needs(int64_t, int, int64_t) const { return true; }

  void operator()(const float* sums, int64_t row, int64_t panel) const {
    const int64_t column = panel * PANEL, at = row * num_columns + column;
    float values[PANEL];
    for (int i = 0; i < PANEL; i++) values[i] = sums[i] + (bias ? load(bias[column + i]) : 0.0f);
    if (gating.is_gated) {
      activate_gated(values, values + PANEL / 2, values, PANEL / 2, gating);
      T* const to = out + row * num_columns + panel * (PANEL / 2);
      for (int i = 0; i < PANEL / 2; i++) store(to[i], values[i]);
      return;
    }
    activate(values, PANEL, gating);
    for (int i = 0; i < PANEL; i++) store(out[at + i], values[i] + (residual ? load(residual[at + i]) : 0.0f));
  }
};

// Calls f with the same; see pair_product.h.
template <typename T, typename F>
void with_finish(const ToRows<T>& to, const F& f) {
  f(to);
}

template <typename T>
struct PanelProduct {
  typedef FloatOperands<T> Operands;
  typedef ToRows<T> Finish;
};

}  // namespace
