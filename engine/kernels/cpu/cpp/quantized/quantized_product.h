// Linear layers with quantized weights: a thread unpacks panels in a buffer, and multiplies all rows with them.
#pragma once

#include "../experts.h"
#include "../float_product.h"
#include "../pair_product.h"
#include "unpack.h"

namespace {

typedef PanelProduct<Element>::Operands Operands;

struct QuantizedWeights {
  const HalfPanel* halves;  // two for each panel
  const Element* bias;      // [columns], or null
};

// A thread's buffer for unpacked panels, aligned to a cache line.
inline Element* panel_buffer(int64_t size) {
  static thread_local std::vector<Element> buffer;
  if (int64_t(buffer.size()) < size + 32) buffer.resize(size + 32);
  return (Element*)((uintptr_t(buffer.data()) + 63) / 64 * 64);
}

// Rows [first, end) that the columns from panel `first_panel` of the weights on are multiplied with.
struct RowRange {
  int64_t first, end, first_panel;
};

// As in product.h, for each range of rows: num_columns columns of its own. Threads divide ranges and panels; each panel is
// unpacked once and multiplied with all rows of its range.
template <typename Finish>
void multiply(const Element* x, const QuantizedWeights& weights, const std::vector<RowRange>& ranges, int64_t num_columns,
              int64_t depth, const Finish& finish) {
  int64_t most_rows = 0;
  for (const RowRange& range : ranges) most_rows = std::max(most_rows, range.end - range.first);
  if (most_rows == 0) return;
  const int64_t num_threads = omp_get_max_threads(), num_panels = num_columns / PANEL, num_ranges = int64_t(ranges.size());
  const bool use_tiles = tiles_granted();
  // Panels multiplied with a row while it is in the first-level cache; unpacked, they fit the second-level cache.
  const int64_t panel_bytes = PANEL * depth * int64_t(sizeof(Element));
  const int64_t most = most_rows <= 64 ? 1 : std::clamp<int64_t>(chunk_bytes() / panel_bytes, 1, 2 * GROUP);
  const int64_t num_groups = std::min(num_panels, round_up(divide_up(num_panels, most), num_threads));
  SharedWork work(num_ranges * num_groups);
#pragma omp parallel
  {
#ifdef HAS_AMX
    if (use_tiles) load_tile_config();
#endif
    Element* panels = panel_buffer(most * PANEL * depth);
    const Operands operands(x, panels, depth);
    ThreadProduct<Operands, Finish> own{operands, finish, 1, use_tiles, Order::panels_stay};
    for (int64_t i = 0; i < work.size(); i++) {
      SharedWork::Share& share = work.share(i);
      for (int64_t item; (item = share.take()) < share.end;) {
        const RowRange& rows = ranges[item / num_groups];
        const int64_t group = item % num_groups;
        const int64_t start = part_start(num_panels, num_groups, group), end = part_start(num_panels, num_groups, group + 1);
        for (int64_t p = start; p < end; p++) {
          if (!finish.needs(rows.first, int(rows.end - rows.first), p)) continue;
          for (int h = 0; h < 2; h++)
            unpack(weights.halves[2 * (rows.first_panel + p) + h], depth,
                   panels + (p - start) * PANEL * depth + WORD * word_index(Operands::TOGETHER, HALF * h, 0, depth / WORD),
                   Operands::TOGETHER);
        }
        own.panels_from = start;
        own.multiply_group(rows.first, rows.end, start, end);
      }
    }
    finish_block(own.before, finish);
#ifdef HAS_AMX
    if (use_tiles) _tile_release();
#endif
  }
}

template <typename Finish>
void multiply_all(const Element* x, const QuantizedWeights& weights, int64_t num_rows, int64_t num_columns, int64_t depth,
                  const Finish& finish) {
  multiply(x, weights, {{0, num_rows, 0}}, num_columns, depth, finish);
}

// As in experts.h.
template <typename Finish>
void multiply_experts(const Element* x, const QuantizedWeights& weights, int64_t num_columns, int64_t depth,
                      const Finish& finish) {
  std::vector<RowRange> ranges;
  for (const ExpertBlock& block : current_routing().blocks) {
    const int64_t first_panel = block.expert * (num_columns / PANEL), end = block.first_row + block.count;
    if (!ranges.empty() && ranges.back().first_panel == first_panel)
      ranges.back().end = end;
    else
      ranges.push_back({block.first_row, end, first_panel});
  }
  multiply(x, weights, ranges, num_columns, depth, finish);
}

}  // namespace
