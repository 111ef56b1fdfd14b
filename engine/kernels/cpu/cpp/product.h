// Linear layers in bf16 on tiles or vectors, with what follows them: bias, residual stream, SwiGLU.
#pragma once

#include "pairs.h"

#ifdef HAS_AVX512
#include <omp.h>
#include <unistd.h>

#include <atomic>
#include <vector>

namespace {

constexpr int PANEL = 32;  // output columns whose weights lie together
// How far ahead of their use weights for vectors are fetched: by itself the processor stops at the end of a page.
constexpr int64_t AHEAD_BYTES = 4096;

constexpr int GROUP = 4;   // panels that 32 rows meet in turn, at most: their output's pages are touched once

// Bytes of input rows that stay in the second-level cache, beside panels and output, while all panels pass.
inline int64_t chunk_bytes() {
  static const int64_t cache_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return (cache_bytes > 0 ? cache_bytes : 1024 * 1024) * 5 / 8;
}

// What becomes of a row of sums for one panel: bias, residual stream and the way to bf16; a gated panel holds 16 columns of
// the gate beside the same of the other.
struct ToOutput {
  const bf16 *bias, *residual;
  bf16* out;
  int64_t num_columns;  // of the output and of the residual
  bool is_gated;

  bool needs(int64_t, int, int64_t) const { return true; }

  void operator()(const float* sums, int64_t row, int64_t panel) const {
    __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
    if (is_gated) {
      store_16(out + row * num_columns + panel * (PANEL / 2), _mm512_mul_ps(silu_16(low), high));
      return;
    }
    const int64_t column = panel * PANEL, at = row * num_columns + column;
    if (bias) low = _mm512_add_ps(low, load_16(bias + column)), high = _mm512_add_ps(high, load_16(bias + column + 16));
    if (residual) low = _mm512_add_ps(low, load_16(residual + at)), high = _mm512_add_ps(high, load_16(residual + at + 16));
    _mm512_storeu_si512(out + at, __m512i(_mm512_cvtne2ps_pbh(high, low)));
  }
};

// The largest sum of a row among those that a thread has seen, for each of 16 columns of a panel's halves.
struct alignas(64) Largest {
  float value[16];
  int32_t column[16];

  void clear() {
    _mm512_store_ps(value, _mm512_set1_ps(-INFINITY));
    _mm512_store_si512(column, _mm512_setzero_si512());
  }

  void add(__m512 values, int first_column, __mmask16 allowed) {
    const __mmask16 larger = _mm512_mask_cmp_ps_mask(allowed, values, _mm512_load_ps(value), _CMP_GT_OQ);
    const __m512i columns = _mm512_add_epi32(
        _mm512_set1_epi32(first_column), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    _mm512_mask_store_ps(value, larger, values);
    _mm512_mask_store_epi32(column, larger, columns);
  }
};

// Keeps the largest of a row of sums, and nothing else. Columns that are not allowed take no part, and panels without an
// allowed column are not computed.
struct ToLargest {
  const bf16* bias;
  const uint32_t* allowed;  // [rows][panels], a bit for each column; null: all are allowed
  int64_t num_panels;
  Largest* largest;  // [threads][rows]
  int64_t num_rows;

  bool needs(int64_t first_row, int count, int64_t panel) const {
    uint32_t columns = !allowed;
    for (int64_t row = first_row; allowed && row < first_row + count; row++) columns |= allowed[row * num_panels + panel];
    return columns;
  }

  void operator()(const float* sums, int64_t row, int64_t panel) const {
    __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
    const int64_t column = panel * PANEL;
    const uint32_t columns = allowed ? allowed[row * num_panels + panel] : ~0u;
    if (bias) low = _mm512_add_ps(low, load_16(bias + column)), high = _mm512_add_ps(high, load_16(bias + column + 16));
    Largest& best = largest[omp_get_thread_num() * num_rows + row];
    best.add(low, int(column), __mmask16(columns));
    best.add(high, int(column) + 16, __mmask16(columns >> 16));
  }
};

// A block of sums on its way, row by row, to what `finish` makes of it.
template <typename Finish>
struct Unfinished {
  const Finish& finish;
  const float* block = nullptr;
  int64_t first_row = 0, panel = 0;
  int row = 0, count = 0;

  void finish_rows(int num_rows) {
    for (const int end = std::min(count, row + num_rows); row < end; row++)
      finish(block + row * PANEL, first_row + row, panel);
  }
};

// block[r][c] (32 x 32) = 32 rows of x times one panel of weights, [pairs of K][32 columns][2]: read from end to end, since
// the processor fetches one stream ahead of its use, and hardly two that alternate.
// The block before it is finished meanwhile, since tile products leave the vector units idle.
#ifdef HAS_AMX
template <typename Finish>
void multiply_tiles(const bf16* x, const bf16* panel, float* block, int64_t depth, Unfinished<Finish>& before) {
  const int rows_a_step = int((32 * 32 + depth - 1) / depth);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < depth; k += 32) {
    _tile_loadd(4, x + k, depth * 2);
    _tile_loadd(6, panel + k * PANEL, 128);
    _tile_loadd(7, panel + k * PANEL + 32, 128);
    _tile_loadd(5, x + 16 * depth + k, depth * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    before.finish_rows(rows_a_step);
  }
  before.finish_rows(32);
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
    for (int64_t k = 0; k < depth; k += 2) {
      const bf16* columns = panel + k * PANEL;
      _mm_prefetch((const char*)columns + AHEAD_BYTES, _MM_HINT_T1);
      _mm_prefetch((const char*)columns + AHEAD_BYTES + 64, _MM_HINT_T1);
      sums.add(x + first * depth + k, depth, columns, 32);
    }
    sums.store(block + first * PANEL, PANEL);
  });
}

inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Where part `index` of `num_parts` begins, all of one size or one less.
inline int64_t part_start(int64_t count, int64_t num_parts, int64_t index) { return count * index / num_parts; }

// finish(sums, row, panel) for every row of x times every panel of weights, on all threads.
template <typename Finish>
void multiply(const bf16* x, const bf16* packed, int64_t num_rows, int64_t num_columns, int64_t depth, const Finish& finish) {
  if (num_rows == 0) return;
  const int64_t num_threads = omp_get_max_threads();
  const int64_t num_panels = num_columns / PANEL;
  const bool use_tiles = tiles_granted();
  // What is read lies within the rows rounded up to 32: tiles read 32 at a time, vectors 4.
  const int64_t row_unit = use_tiles ? 32 : 4, num_units = (num_rows + row_unit - 1) / row_unit;
  // Few rows: every thread has all of them, and some of the panels. Many: as many rows as the others.
  const int64_t most_rows = std::max<int64_t>(32, chunk_bytes() / (depth * 2));
  const int64_t num_chunks = num_rows < 256 ? 1 : round_up((num_rows + most_rows - 1) / most_rows, num_threads);
  const int64_t num_groups = round_up((num_panels + GROUP - 1) / GROUP, num_chunks == 1 ? num_threads : 1);
  std::vector<std::atomic<int64_t>> next_groups(num_chunks);  // of each chunk, the next that nobody has begun
#pragma omp parallel
  {
#ifdef HAS_AMX
    if (use_tiles) load_tile_config();
#endif
    alignas(64) float blocks[2][32 * PANEL];
    int turn = 0;
    Unfinished<Finish> before{finish};
    // A thread begins with its own chunks, and helps with the others' when it is done: cores are not always alike.
    const int64_t home = part_start(num_chunks, num_threads, omp_get_thread_num());
    for (int64_t i = 0; i < num_chunks; i++) {
      const int64_t chunk = (home + i) % num_chunks;
      const int64_t start = part_start(num_units, num_chunks, chunk) * row_unit;
      const int64_t end = std::min(num_rows, part_start(num_units, num_chunks, chunk + 1) * row_unit);
      for (int64_t group; (group = next_groups[chunk].fetch_add(1, std::memory_order_relaxed)) < num_groups;) {
        const int64_t last_panel = part_start(num_panels, num_groups, group + 1);
        for (int64_t first = start; first < end; first += 32) {
          const int count = int(std::min<int64_t>(32, end - first));
          for (int64_t p = part_start(num_panels, num_groups, group); p < last_panel; p++) {
            if (!finish.needs(first, count, p)) continue;
            turn ^= 1;
            const bf16 *from = x + first * depth, *panel = packed + p * PANEL * depth;
#ifdef HAS_AMX
            if (use_tiles)
              multiply_tiles(from, panel, blocks[turn], depth, before);
            else
#endif
            {
              multiply_vectors(from, panel, blocks[turn], depth, count);
              before.finish_rows(32);
            }
            before.block = blocks[turn];
            before.first_row = first, before.panel = p;
            before.row = 0, before.count = count;
          }
        }
      }
    }
    before.finish_rows(32);
#ifdef HAS_AMX
    if (use_tiles) _tile_release();
#endif
  }
}

// out = x times packed weights, + bias, + residual; or silu(gate) * up for gated panels.
void project(const bf16* x, const bf16* packed, const bf16* bias, const bf16* residual, bf16* out, int64_t num_rows,
             int64_t num_columns, int64_t depth, bool is_gated) {
  const int64_t out_columns = is_gated ? num_columns / 2 : num_columns;
  multiply(x, packed, num_rows, num_columns, depth, ToOutput{bias, residual, out, out_columns, is_gated});
}

// out[row] = the column of the largest of x times packed weights, + bias, of those allowed; the first one of several.
void largest_column(const bf16* x, const bf16* packed, const bf16* bias, const uint32_t* allowed, int64_t* out,
                    int64_t num_rows, int64_t num_columns, int64_t depth) {
  const int num_threads = omp_get_max_threads();
  std::vector<Largest> largest(num_threads * num_rows);
  for (Largest& best : largest) best.clear();
  multiply(x, packed, num_rows, num_columns, depth,
           ToLargest{bias, allowed, num_columns / PANEL, largest.data(), num_rows});
  for (int64_t row = 0; row < num_rows; row++) {
    float value = -INFINITY;
    out[row] = 0;
    for (int thread = 0; thread < num_threads; thread++) {
      const Largest& best = largest[thread * num_rows + row];
      for (int lane = 0; lane < 16; lane++) {
        if (best.value[lane] > value || (best.value[lane] == value && best.column[lane] < out[row]))
          value = best.value[lane], out[row] = best.column[lane];
      }
    }
  }
}

}  // namespace
#endif
