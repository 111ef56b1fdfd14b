// Linear layers in bf16 on tiles or vectors, with what follows them: bias, residual stream, SwiGLU.
#pragma once

#include "pairs.h"

#ifdef HAS_AVX512
#include <omp.h>
#include <unistd.h>

namespace {

constexpr int PANEL = 32;  // output columns whose weights lie together
constexpr int GROUP = 4;   // panels that 32 rows meet in turn: their output's pages are touched once

// Bytes of input rows that stay in the second-level cache, beside panels and output, while all panels pass.
inline int64_t chunk_bytes() {
  static const int64_t cache_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return (cache_bytes > 0 ? cache_bytes : 1024 * 1024) * 5 / 8;
}

// One row of a block to the output; a gated panel holds 16 columns of the gate beside the same of the other.
inline void finish_row(const float* block, const bf16* bias, const bf16* residual, bf16* out, bool is_gated) {
  __m512 low = _mm512_load_ps(block), high = _mm512_load_ps(block + 16);
  if (is_gated) {
    store_16(out, _mm512_mul_ps(silu_16(low), high));
    return;
  }
  if (bias) low = _mm512_add_ps(low, load_16(bias)), high = _mm512_add_ps(high, load_16(bias + 16));
  if (residual) low = _mm512_add_ps(low, load_16(residual)), high = _mm512_add_ps(high, load_16(residual + 16));
  _mm512_storeu_si512(out, __m512i(_mm512_cvtne2ps_pbh(high, low)));
}

// A block of sums on its way to the output, row by row.
struct Unfinished {
  const float* block = nullptr;
  const bf16 *bias = nullptr, *residual = nullptr;
  bf16* out = nullptr;
  int64_t stride = 0;  // of the output and of the residual
  int row = 0, count = 0;
  bool is_gated = false;

  void finish(int num_rows) {
    for (const int end = std::min(count, row + num_rows); row < end; row++)
      finish_row(block + row * PANEL, bias, residual ? residual + row * stride : nullptr, out + row * stride, is_gated);
  }
};

// block[r][c] (32 x 32) = 32 rows of x times one panel of weights, [K / 32][2 halves][16 pairs of K][16 columns][2].
// The block before it is finished meanwhile, since tile products leave the vector units idle.
#ifdef HAS_AMX
void multiply_tiles(const bf16* x, const bf16* panel, float* block, int64_t depth, Unfinished& before) {
  const int rows_a_step = int((32 * 32 + depth - 1) / depth);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < depth; k += 32) {
    _tile_loadd(4, x + k, depth * 2);
    _tile_loadd(6, panel + k * PANEL, 64);
    _tile_loadd(7, panel + k * PANEL + 512, 64);
    _tile_loadd(5, x + 16 * depth + k, depth * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    before.finish(rows_a_step);
  }
  before.finish(32);
  _tile_stored(0, block, PANEL * 4);
  _tile_stored(1, block + 16, PANEL * 4);
  _tile_stored(2, block + 16 * PANEL, PANEL * 4);
  _tile_stored(3, block + 16 * PANEL + 16, PANEL * 4);
}
#endif

// The first `count` rows of the same.
void multiply_vectors(const bf16* x, const bf16* panel, float* block, int64_t depth, int count) {
  by_rows(count, [=](auto rows, int first) {
    RowSums<rows> sums;
    sums.clear();
    for (int64_t k = 0; k < depth; k += 32) {
      const bf16* columns = panel + k * PANEL;
      for (int pair = 0; pair < 16; pair++)
        sums.add(x + first * depth + k + 2 * pair, depth, columns + pair * 32, columns + 512 + pair * 32);
    }
    sums.store(block + first * PANEL, PANEL);
  });
}

// out = x times packed weights, + bias, + residual; or silu(gate) * up for gated panels.
void project(const bf16* x, const bf16* packed, const bf16* bias, const bf16* residual, bf16* out, int64_t num_rows,
             int64_t num_columns, int64_t depth, bool is_gated) {
  const int64_t num_panels = num_columns / PANEL, num_groups = (num_panels + GROUP - 1) / GROUP;
  const int64_t most_rows = std::max<int64_t>(32, chunk_bytes() / (depth * 2));
  int64_t num_chunks = (num_rows + most_rows - 1) / most_rows;
  if (num_rows >= 256) num_chunks = std::max<int64_t>(num_chunks, omp_get_max_threads());
  const int64_t chunk_rows = ((num_rows + num_chunks - 1) / num_chunks + 31) / 32 * 32;
  const int64_t out_panel = is_gated ? PANEL / 2 : PANEL, out_columns = num_panels * out_panel;
  [[maybe_unused]] const bool use_tiles = tiles_granted();
#pragma omp parallel
  {
#ifdef HAS_AMX
    if (use_tiles) load_tile_config();
#endif
    alignas(64) float blocks[2][32 * PANEL];
    int turn = 0;
    Unfinished before;
#pragma omp for schedule(static) collapse(2) nowait
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
      for (int64_t group = 0; group < num_groups; group++) {
        const int64_t end = std::min(num_rows, (chunk + 1) * chunk_rows);
        const int64_t last_panel = std::min(num_panels, (group + 1) * GROUP);
        for (int64_t first = chunk * chunk_rows; first < end; first += 32) {
          const int count = int(std::min<int64_t>(32, end - first));
          for (int64_t p = group * GROUP; p < last_panel; p++) {
            const int64_t at = first * out_columns + p * out_panel;
            turn ^= 1;
            const bf16 *from = x + first * depth, *panel = packed + p * PANEL * depth;
#ifdef HAS_AMX
            if (use_tiles)
              multiply_tiles(from, panel, blocks[turn], depth, before);
            else
#endif
            {
              multiply_vectors(from, panel, blocks[turn], depth, count);
              before.finish(32);
            }
            before = {blocks[turn], bias ? bias + p * PANEL : nullptr, residual ? residual + at : nullptr, out + at,
                      out_columns,  0, count, is_gated};
          }
        }
      }
    }
    before.finish(32);
#ifdef HAS_AMX
    if (use_tiles) _tile_release();
#endif
  }
}

}  // namespace
#endif
