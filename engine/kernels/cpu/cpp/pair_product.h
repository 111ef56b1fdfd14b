// Linear layers in bf16 on tiles or vectors, then bias, activation and residual stream.
#pragma once

#include "activation.h"
#include "float_product.h"
#include "pairs.h"

#ifdef HAS_AVX512
namespace {

// Finishes a row of sums for one panel: bias, activation, residual stream, rounding to bf16.
struct ToOutput {
  const bf16 *bias, *residual;
  bf16* out;
  int64_t num_columns;  // of the output and of the residual
  Gating gating;

  bool needs(int64_t, int, int64_t) const { return true; }

  void operator()(const float* sums, int64_t row, int64_t panel) const {
    __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
    const int64_t column = panel * PANEL, at = row * num_columns + column;
    if (bias) low = _mm512_add_ps(low, load_16(bias + column)), high = _mm512_add_ps(high, load_16(bias + column + 16));
    if (gating.is_gated) {
      store_16(out + row * num_columns + panel * (PANEL / 2),
               _mm512_mul_ps(activate_16(low, gating), gated_16(high, gating)));
      return;
    }
    if (gating.activation != Activation::none) low = activate_16(low, gating), high = activate_16(high, gating);
    if (residual) low = _mm512_add_ps(low, load_16(residual + at)), high = _mm512_add_ps(high, load_16(residual + at + 16));
    store_32(out + at, low, high);
  }
};

// silu(gate) * up of a row of sums for one panel, without a bias: the case of most models, without branches per row.
struct ToSwiglu {
  bf16* out;
  int64_t num_columns;  // of the output

  bool needs(int64_t, int, int64_t) const { return true; }

  void operator()(const float* sums, int64_t row, int64_t panel) const {
    store_16(out + row * num_columns + panel * (PANEL / 2),
             _mm512_mul_ps(gate_16(_mm512_load_ps(sums)), _mm512_load_ps(sums + 16)));
  }
};

// Calls f with ToSwiglu if that computes the same, else with `to`.
template <typename F>
void with_finish(const ToOutput& to, const F& f) {
  if (to.gating.is_gated && to.gating.activation == Activation::silu && !to.bias)
    f(ToSwiglu{to.out, to.num_columns});
  else
    f(to);
}

// Rows of x [rows, depth] and panels [pairs of depth][32 columns][2]. A panel is read sequentially: the hardware prefetches
// one stream well, but not two that alternate.
struct PairOperands {
  typedef float Sum;
  static constexpr bool has_shared_panels = true, has_tiles = true;
  static constexpr int TOGETHER = PANEL;
  const bf16 *x, *panels;
  int64_t depth, row_bytes;

  PairOperands(const bf16* x, const bf16* panels, int64_t depth)
      : x(x), panels(panels), depth(depth), row_bytes(depth * int64_t(sizeof(bf16))) {}

#ifdef HAS_AMX
  void begin_tiles(int64_t) const {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static void multiply_tiles() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
#endif

  // block[r][c] (32 x 32) = the first `count` of 32 rows of x times one panel.
  void multiply_vectors(int64_t first_row, int64_t panel, float* block, int count) const {
    const bf16 *from = x + first_row * depth, *columns = panels + panel * PANEL * depth;
    by_rows(count, [=](auto rows, int first) {
      if constexpr (rows == 8)
        multiply_8_rows(from + first * depth, columns, depth, block + first * PANEL);
      else
        multiply_rows<rows>(from + first * depth, columns, depth, block + first * PANEL);
    });
  }

  template <int R>
  __attribute__((always_inline)) static void multiply_rows(const bf16* from, const bf16* columns, int64_t size, float* block) {
    RowSums<R> sums;
    sums.clear();
    for (int64_t k = 0; k < size; k += 2) {
      const bf16* pairs = columns + k * PANEL;
      _mm_prefetch((const char*)pairs + AHEAD_BYTES, _MM_HINT_T1);
      _mm_prefetch((const char*)pairs + AHEAD_BYTES + 64, _MM_HINT_T1);
      sums.add(from + k, size, pairs, 32);
    }
    sums.store(block, PANEL);
  }

  // Not inlined: inlining makes the other block sizes 5 % slower.
  __attribute__((noinline)) static void multiply_8_rows(const bf16* from, const bf16* columns, int64_t size, float* block) {
    multiply_rows<8>(from, columns, size, block);
  }
};

template <>
struct PanelProduct<bf16> {
  typedef PairOperands Operands;
  typedef ToOutput Finish;
};

}  // namespace
#endif
