// Converts weights to bytes when a model is loaded.
#pragma once

#include "quad_product.h"
#include "spread.h"

// Converts columns [depth][num_columns] to the panels and offsets of QuadWeights. num_columns is a multiple of PANEL, depth of
// 4. inverse: factor of each column. panels: all 0 before.
extern "C" void round_columns_int8(const float* columns, const float* inverse, int8_t* panels, int32_t* offsets,
                                   int64_t num_columns, int64_t depth) {
#pragma omp parallel for
  for (int64_t column = 0; column < num_columns; column += 16) {
    int8_t* quads = panels + column / PANEL * PANEL * padded_depth(depth) + column % PANEL * 4;
    const Lanes factor = load_lanes(inverse + column);
    Ints sums = {};
    Bits quad = {};
    for (int64_t row = 0; row < depth; row++) {
      Lanes rounded = load_lanes(columns + row * num_columns + column) * factor;
      rounded = (rounded + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: to whole numbers
      const Ints whole = __builtin_convertvector(rounded, Ints);
      sums += whole;
      quad = (quad >> 8) | (Bits(whole) << 24);
      if (row % 4 == 3) store_ints(quads + row / 4 * PANEL * 4, Ints(quad));
    }
    store_ints(offsets + column, sums * -128);
  }
}

// Transforms each column [depth] as `spread_groups` does a row. 16 columns at a time.
extern "C" void spread_columns_int8(float* columns, int64_t depth, int64_t num_columns) {
#pragma omp parallel for
  for (int64_t first = 0; first < num_columns; first += 16) {
    const size_t bytes = sizeof(float) * std::min<int64_t>(16, num_columns - first);
    by_group(depth, [&](auto group) {
      constexpr int64_t size = 16 * group;
      Lanes rows[size] = {};
      for (int64_t start = 0; start < depth; start += size) {
        float* place = columns + start * num_columns + first;
        for (int64_t row = 0; row < size; row++) std::memcpy(&rows[row], place + row * num_columns, bytes);
        for (int64_t width = 1; width < size; width *= 2)
          for (int64_t row = 0; row < size; row++) {
            if (row & width) continue;
            const Lanes a = rows[row], b = rows[row + width];
            rows[row] = a + b, rows[row + width] = a - b;
          }
        for (int64_t row = 0; row < size; row++) std::memcpy(place + row * num_columns, &rows[row], bytes);
      }
    });
  }
}
