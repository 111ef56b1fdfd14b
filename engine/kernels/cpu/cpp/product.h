// Products of every format: the order in which blocks of rows are multiplied with panels of weights, and the arg max.
#pragma once

#include <omp.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "number.h"

namespace {

constexpr int PANEL = 32;  // output columns of a panel of weights

// Index of a word of a panel [32 / together][words of depth][together columns].
constexpr int64_t word_index(int together, int64_t column, int64_t word, int64_t num_words) {
  return (column / together * num_words + word) * together + column % together;
}
// Distance of the prefetch of weights for vectors: the hardware's own prefetch stops at the end of a page.
constexpr int64_t AHEAD_BYTES = 4096;

constexpr int GROUP = 4;   // most panels multiplied with 32 rows one after the other: their output's pages are touched once
constexpr int TILE_GROUP = 8;               // the same on tiles
constexpr int64_t DEPTH_BYTES = 4096;       // most bytes of a row that tiles multiply with a group of panels at a time
constexpr int64_t FEW_ROWS = 256;           // fewer rows than these all stay in the second-level cache
constexpr int64_t LARGE_WEIGHTS = 4 << 20;  // bytes of weights from which on tiles read them once, and rows again and again

// Bytes of input rows, or of panels, that stay in the second-level cache, besides all else, while they are multiplied.
inline int64_t chunk_bytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
  static const int64_t cache_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  constexpr int64_t cache_bytes = 0;
#endif
  return (cache_bytes > 0 ? cache_bytes : 1024 * 1024) / 2;
}

// A thread's largest value of a row, and its column, for each of 16 lanes.
struct alignas(64) Largest {
  typedef int32_t Columns __attribute__((vector_size(64)));
  Lanes value = Lanes{} - INFINITY;
  Columns column = {};

  // allowed: a bit for each column, set if it may be chosen.
  void add(Lanes values, int32_t first_column, uint32_t allowed) {
    const Columns lanes = Columns{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, columns = lanes + first_column;
    // On ties the lowest column: a thread that helps others may come to lower columns than its own.
    const Columns is_larger =
        ((values > value) | ((values == value) & (columns < column))) & -((int32_t(allowed) >> lanes) & 1);
    value = is_larger ? values : value;
    column = is_larger ? columns : column;
  }
};

// The columns that may be chosen: null for all, or [rows][panels] with a bit for each column. Panels without any are skipped.
struct AllowedColumns {
  const uint32_t* bits;
  int64_t num_panels;

  uint32_t of(int64_t row, int64_t panel) const { return bits ? bits[row * num_panels + panel] : ~0u; }

  bool needs(int64_t first_row, int count, int64_t panel) const {
    uint32_t columns = 0;
    for (int64_t row = first_row; row < first_row + count; row++) columns |= of(row, panel);
    return columns;
  }
};

// out[row] = the column of the largest value over all threads, the lowest on ties. largest: [threads][rows].
inline void choose_largest(const std::vector<Largest>& largest, int64_t* out, int64_t num_rows) {
  for (int64_t row = 0; row < num_rows; row++) {
    float value = -INFINITY;
    out[row] = 0;
    for (size_t at = row; at < largest.size(); at += num_rows) {
      const Largest& best = largest[at];
      for (int lane = 0; lane < 16; lane++) {
        if (best.value[lane] > value || (best.value[lane] == value && best.column[lane] < out[row]))
          value = best.value[lane], out[row] = best.column[lane];
      }
    }
  }
}

// The Values of sums that are only biased. bias: [columns], or null.
template <typename T>
struct AddBias {
  const T* bias;

  Lanes operator()(const float* sums, int64_t, int64_t column) const {
    const Lanes values = load_lanes(sums);
    return bias ? values + load_lanes(bias + column) : values;
  }
};

// A Finish that updates the largest column of a row; the sums are not stored.
// values(sums, row, column): the values of 16 columns, of which `column` is the first.
template <typename Values>
struct ToLargest {
  Values values;
  AllowedColumns allowed;
  Largest* largest;  // [threads][rows]
  int64_t num_rows;

  bool needs(int64_t first_row, int count, int64_t panel) const { return allowed.needs(first_row, count, panel); }

  template <typename Sum>
  void operator()(const Sum* sums, int64_t row, int64_t panel) const {
    const uint32_t columns = allowed.of(row, panel);
    Largest& best = largest[omp_get_thread_num() * num_rows + row];
    for (int first = 0; first < PANEL; first += 16) {
      const int64_t column = panel * PANEL + first;
      best.add(values(sums + first, row, column), int32_t(column), columns >> first);
    }
  }
};

// out[row] = the arg max of the values over the allowed columns; the lowest column on ties. multiply_to(finish) multiplies.
template <typename Values, typename Multiply>
void find_largest(const uint32_t* allowed, int64_t* out, int64_t num_rows, int64_t num_columns, const Values& values,
                  const Multiply& multiply_to) {
  std::vector<Largest> largest(omp_get_max_threads() * num_rows);
  multiply_to(ToLargest<Values>{values, {allowed, num_columns / PANEL}, largest.data(), num_rows});
  choose_largest(largest, out, num_rows);
}

// A block of sums for which `finish` has not been called yet.
template <typename Sum>
struct Unfinished {
  const Sum* block = nullptr;
  int64_t first_row = 0, panel = 0;
  int count = 0;
};

template <typename Sum, typename Finish>
void finish_block(const Unfinished<Sum>& unfinished, const Finish& finish) {
  for (int r = 0; r < unfinished.count; r++) finish(unfinished.block + r * PANEL, unfinished.first_row + r, unfinished.panel);
}

// A thread's memory for sums over a part of the depth.
template <typename Sum>
Sum* kept_sums(int64_t count) {
  struct alignas(64) Line {
    Sum sums[64 / sizeof(Sum)];
  };
  static thread_local std::vector<Line> lines;
  if (int64_t(lines.size() * 64 / sizeof(Sum)) < count) lines.resize(size_t(count) * sizeof(Sum) / 64);
  return lines.data()->sums;
}

// The start of part `index` of `num_parts`; the sizes of parts differ by at most 1.
inline int64_t part_start(int64_t count, int64_t num_parts, int64_t index) { return count * index / num_parts; }

// Items of work, of which each thread has a share of neighbours. A thread computes its own in order, and so reads weights as
// one stream, then helps with those of others: cores may differ in speed.
class SharedWork {
 public:
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;

    // An item that no thread has started, or at least `end`.
    int64_t take() { return next.fetch_add(1, std::memory_order_relaxed); }
  };

  explicit SharedWork(int64_t num_items) : shares_(omp_get_max_threads()) {
    for (int64_t i = 0; i < size(); i++)
      shares_[i].next = part_start(num_items, size(), i), shares_[i].end = part_start(num_items, size(), i + 1);
  }

  int64_t size() const { return int64_t(shares_.size()); }

  // In the order in which this thread takes them.
  Share& share(int64_t index) { return shares_[(omp_get_thread_num() + index) % size()]; }

 private:
  std::vector<Share> shares_;
};

// What tiles prefetch while they multiply a block: for every 64 bytes of depth `count` cache lines, `stride` bytes apart, each
// time `step` bytes further on.
struct Prefetch {
  const char* lines = nullptr;
  int64_t count = 0, stride = 0, step = 0;
};

// Share `index` of the 32 lines from `lines` on.
inline Prefetch share_of_lines(const char* lines, int64_t stride, int64_t step, int64_t index, int64_t num_shares) {
  const int64_t first = part_start(32, num_shares, index);
  return {lines + first * stride, part_start(32, num_shares, index + 1) - first, stride, step};
}

#ifdef HAS_AMX
// A part of the depth, the bytes [begin, end) of rows, and the sums over the earlier parts: null for the first part.
template <typename Sum>
struct DepthPiece {
  int64_t begin, end;
  const Sum* sums;
  Prefetch prefetch;
};

// to[r][c] (32 x 32) = 32 rows of x times one panel, for a part of the depth. Rows of x stay in the first-level cache,
// panels are streamed. Tile products leave the vector units idle, which finish the previous block meanwhile. The loop reads
// only local variables: members would be read again after every store.
// Tile registers: 0 to 3 sums, 4 and 5 rows, 6 and 7 columns.
template <typename Operands, typename Finish>
void multiply_tiles(const Operands& operands, int64_t first_row, int64_t panel, const DepthPiece<typename Operands::Sum>& piece,
                    typename Operands::Sum* to, Unfinished<typename Operands::Sum>& before, const Finish finish) {
  const int64_t stride = operands.row_bytes, size = piece.end - piece.begin;
  const char* const rows = reinterpret_cast<const char*>(operands.x) + first_row * stride + piece.begin;
  const char* const lower_rows = rows + 16 * stride;
  const char* columns = reinterpret_cast<const char*>(operands.panels) + panel * PANEL * stride + piece.begin * PANEL;
  const int64_t rows_a_step = divide_up(32 * 64, size);
  const int64_t line_stride = piece.prefetch.stride, line_step = piece.prefetch.step;
  const int64_t lines_bytes = piece.prefetch.count * line_stride;
  const char* lines = piece.prefetch.lines;
  const int64_t before_panel = before.panel, before_end = before.first_row + before.count;
  const typename Operands::Sum* sums = before.block;
  int64_t row = before.first_row;
  if (piece.sums) {
    _tile_loadd(0, piece.sums, PANEL * 4);
    _tile_loadd(1, piece.sums + 16, PANEL * 4);
    _tile_loadd(2, piece.sums + 16 * PANEL, PANEL * 4);
    _tile_loadd(3, piece.sums + 16 * PANEL + 16, PANEL * 4);
  } else {
    operands.begin_tiles(panel);
  }
  for (int64_t k = 0; k < size; k += 64, columns += 64 * PANEL) {
    _tile_loadd(4, rows + k, stride);
    _tile_stream_loadd(6, columns, 128);
    _tile_stream_loadd(7, columns + 64, 128);
    _tile_loadd(5, lower_rows + k, stride);
    for (int64_t line = 0; line < lines_bytes; line += line_stride) __builtin_prefetch(lines + line, 0, 2);
    lines += line_step;
    Operands::multiply_tiles();
    for (const int64_t end = std::min(before_end, row + rows_a_step); row < end; row++, sums += PANEL)
      finish(sums, row, before_panel);
  }
  for (; row < before_end; row++, sums += PANEL) finish(sums, row, before_panel);
  before.count = 0;
  _tile_stored(0, to, PANEL * 4);
  _tile_stored(1, to + 16, PANEL * 4);
  _tile_stored(2, to + 16 * PANEL, PANEL * 4);
  _tile_stored(3, to + 16 * PANEL + 16, PANEL * 4);
}
#endif

// For an element type: the Operands of `multiply`, and the Finish that stores rows of sums; see float_product.h.
template <typename T>
struct PanelProduct;

// The weights of a linear layer in bf16 or float32, in the layout that the Operands describe. bias: [columns], or null.
template <typename T>
struct PanelWeights {
  const T *panels, *bias;
};

// Up to 32 rows of `operands`.
template <typename Operands>
struct RowBlock {
  Operands operands;
  int64_t first_row;
  int count;
};

template <typename Operands>
RowBlock<Operands> find_block(const Operands& operands, int64_t first, int64_t end) {
  return {operands, first, int(std::min<int64_t>(32, end - first))};
}

// The order of rows and panels, named by what stays in the second-level cache.
enum class Order {
  rows_stay,    // many rows: a chunk of rows, while one group of panels after the other is multiplied with it
  panels_stay,  // many rows, large weights: a group of panels, while 32 rows after the other are multiplied with it
  by_panel      // few rows: all of them are multiplied with a panel before the next one
};

// One thread's part of a product.
template <typename Operands, typename Finish>
struct ThreadProduct {
  typedef typename Operands::Sum Sum;
  static constexpr int64_t BLOCK = 32 * PANEL;

  const Operands& operands;
  const Finish& finish;
  const int64_t num_pieces;  // parts of the depth, on tiles
  const bool use_tiles;
  const Order order;
  int64_t panels_from = 0;  // index of the first panel of operands.panels
  alignas(64) Sum blocks[2][BLOCK] = {};
  int turn = 0;
  Unfinished<Sum> before = {};

  // Rows [start, end) times panels [first_panel, last_panel).
  void multiply_group(int64_t start, int64_t end, int64_t first_panel, int64_t last_panel) {
    const int64_t num_blocks = divide_up(end - start, 32), num_group_panels = last_panel - first_panel;
    const bool by_panel = order == Order::by_panel;
    const int64_t num_outer = by_panel ? num_group_panels : num_blocks, num_inner = by_panel ? num_blocks : num_group_panels;
    Sum* const kept = num_pieces > 1 ? kept_sums<Sum>(num_outer * num_inner * BLOCK) : nullptr;
    for (int64_t piece = 0; piece < num_pieces; piece++) {
      Sum* sums = kept;
      for (int64_t outer = 0; outer < num_outer; outer++) {
        for (int64_t inner = 0; inner < num_inner; inner++, sums += BLOCK) {
          const int64_t block = by_panel ? inner : outer, panel = first_panel + (by_panel ? outer : inner);
          const auto rows = find_block(operands, start + 32 * block, end);
          if (!finish.needs(rows.first_row, rows.count, panel)) continue;
          Prefetch prefetch;
          if (by_panel || block == 0)
            prefetch = next_panel(panel, piece, by_panel ? block : 0, by_panel ? num_blocks : 1);
          else if (order == Order::panels_stay)
            prefetch = next_rows(rows.first_row, piece, inner, num_inner);
          multiply_block(rows, panel, piece, sums, prefetch);
        }
      }
    }
  }

  int64_t piece_start(int64_t piece) const { return part_start(operands.row_bytes / 64, num_pieces, piece) * 64; }

  // Share `index` of the panel after this one.
  Prefetch next_panel(int64_t panel, int64_t piece, int64_t index, int64_t num_shares) const {
    if (!Operands::has_shared_panels) return {};
    const int64_t offset = ((panel + 1 - panels_from) * operands.row_bytes + piece_start(piece)) * PANEL;
    return share_of_lines(reinterpret_cast<const char*>(operands.panels) + offset, 64, 64 * PANEL, index, num_shares);
  }

  // Share `index` of the 32 rows after these.
  Prefetch next_rows(int64_t first_row, int64_t piece, int64_t index, int64_t num_shares) const {
    const int64_t offset = (first_row + 32) * operands.row_bytes + piece_start(piece);
    return share_of_lines(reinterpret_cast<const char*>(operands.x) + offset, operands.row_bytes, 64, index, num_shares);
  }

  // A block of rows times one panel, for a part of the depth. sums: in and out, over the parts so far; the last part writes
  // to `blocks` instead.
  template <typename BlockOperands>
  void multiply_block(const RowBlock<BlockOperands>& rows, int64_t panel, int64_t piece, Sum* sums,
                      const Prefetch& prefetch) {
    const int64_t at = panel - panels_from;
    Sum* const block = blocks[turn ^ 1];
    bool is_done = false;
#ifdef HAS_AMX
    if constexpr (Operands::has_tiles) {
      const DepthPiece<Sum> depth{piece_start(piece), piece_start(piece + 1), piece ? sums : nullptr, prefetch};
      if (piece < num_pieces - 1) return multiply_tiles(rows.operands, rows.first_row, at, depth, sums, before, finish);
      if (use_tiles) multiply_tiles(rows.operands, rows.first_row, at, depth, block, before, finish), is_done = true;
    }
#endif
    if (!is_done) {
      rows.operands.multiply_vectors(rows.first_row, at, block, rows.count);
      finish_block(before, finish);
    }
    turn ^= 1;
    before = {block, rows.first_row, panel, rows.count};
  }
};

// Threads take groups of panels, each for a chunk of the rows.
struct Division {
  int64_t num_chunks, num_groups;
};

// piece_bytes: of a row that is multiplied at a time.
inline Division divide(Order order, bool use_tiles, int64_t num_rows, int64_t num_panels, int64_t piece_bytes) {
  const int64_t num_threads = omp_get_max_threads();
  if (order == Order::panels_stay) {
    const int64_t num_groups = divide_up(num_panels, std::max<int64_t>(1, chunk_bytes() / (piece_bytes * PANEL)));
    if (num_groups < num_threads) return {divide_up(num_threads, num_groups), num_groups};
    return {1, round_up(num_groups, num_threads)};
  }
  const int64_t num_groups = divide_up(num_panels, use_tiles ? TILE_GROUP : GROUP);
  if (num_rows < FEW_ROWS) return {1, round_up(num_groups, num_threads)};
  return {round_up(divide_up(num_rows, std::max<int64_t>(32, chunk_bytes() / piece_bytes)), num_threads), num_groups};
}

// Multiplies rows of x with panels of weights, on all threads, and calls finish(sums, row, panel) for every row and every
// panel that finish.needs.
// Operands have: the type Sum; has_shared_panels: whether all rows use the same panels; x, panels; row_bytes: of a row of x;
// multiply_vectors(first_row, panel, block, count); if has_tiles, begin_tiles(panel) and multiply_tiles(), on the tile
// registers that the function multiply_tiles loads.
// row_unit: rows are distributed to threads in multiples of it.
template <typename Operands, typename Finish>
void multiply(const Operands& operands, int64_t num_rows, int64_t num_columns, const Finish& finish,
              int64_t row_unit = Operands::has_tiles && tiles_granted() ? 32 : 4) {
  if (num_rows == 0) return;
  const int64_t num_panels = num_columns / PANEL;
  const bool use_tiles = Operands::has_tiles && tiles_granted();
  Order order = Order::rows_stay;
  if (use_tiles && Operands::has_shared_panels) {
    if (num_rows < FEW_ROWS)
      order = Order::by_panel;
    else if (num_columns * operands.row_bytes >= LARGE_WEIGHTS)
      order = Order::panels_stay;
  }
  const int64_t num_pieces = use_tiles ? divide_up(operands.row_bytes, DEPTH_BYTES) : 1;
  const Division parts = divide(order, use_tiles, num_rows, num_panels, divide_up(operands.row_bytes, num_pieces));
  const int64_t num_chunks = parts.num_chunks, num_groups = parts.num_groups;
  // Tiles read 32 rows at a time, vectors 4: never beyond the rows rounded up to 32.
  const int64_t num_units = divide_up(num_rows, row_unit);
  SharedWork work(num_chunks * num_groups);
#pragma omp parallel
  {
#ifdef HAS_AMX
    if (use_tiles) load_tile_config();
#endif
    ThreadProduct<Operands, Finish> own{operands, finish, num_pieces, use_tiles, order};
    for (int64_t i = 0; i < work.size(); i++) {
      SharedWork::Share& share = work.share(i);
      for (int64_t item; (item = share.take()) < share.end;) {
        const int64_t chunk = item / num_groups, group = item % num_groups;
        const int64_t start = part_start(num_units, num_chunks, chunk) * row_unit;
        const int64_t end = std::min(num_rows, part_start(num_units, num_chunks, chunk + 1) * row_unit);
        own.multiply_group(start, end, part_start(num_panels, num_groups, group),
                           part_start(num_panels, num_groups, group + 1));
      }
    }
    finish_block(own.before, finish);
#ifdef HAS_AMX
    if (use_tiles) _tile_release();
#endif
  }
}

}  // namespace
