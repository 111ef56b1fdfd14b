// Converts weights to bytes when a model is loaded.
#pragma once

#include "quad_product.h"

namespace {

constexpr int MAX_FEEDBACK = 64;  // largest block of weights that compensate each other's errors

// Converts `size` weights of each of 16 columns to bytes; returns the sums of the columns. Before weight i is rounded,
// feedback[i][j] times the rounding error of each earlier weight j is added to it.
inline Ints round_block(const float* columns, Lanes inverse, const float* feedback, int8_t* quads, int64_t num_columns,
                        int size) {
  Lanes errors[MAX_FEEDBACK];
  Ints sums = {};
  Bits quad = {};
  for (int i = 0; i < size; i++) {
    Lanes wanted[4] = {load_lanes(columns + i * num_columns) * inverse};
    for (int j = 0; feedback && j < i; j++) wanted[j % 4] += errors[j] * feedback[i * size + j];
    const Lanes x = (wanted[0] + wanted[1]) + (wanted[2] + wanted[3]);
    Lanes rounded = (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: to whole numbers
    rounded = rounded > 127.0f ? Lanes{} + 127.0f : rounded;
    rounded = rounded < -127.0f ? Lanes{} - 127.0f : rounded;
    errors[i] = x - rounded;
    const Ints whole = __builtin_convertvector(rounded, Ints);
    sums += whole;
    quad = (quad >> 8) | (Bits(whole) << 24);
    if (i % 4 == 3) store_ints(quads + i / 4 * PANEL * 4, Ints(quad));
  }
  return sums;
}

}  // namespace

// Converts columns [depth][num_columns] to the panels and offsets of QuadWeights. num_columns is a multiple of PANEL, size
// of 4. inverse: factor of each column. feedback: null, or [depth / size][size][size]. panels: all 0 before.
extern "C" void round_columns_int8(const float* columns, const float* inverse, const float* feedback, int8_t* panels,
                                   int32_t* offsets, int64_t num_columns, int64_t depth, int size) {
#pragma omp parallel for
  for (int64_t column = 0; column < num_columns; column += 16) {
    int8_t* quads = panels + column / PANEL * PANEL * padded_depth(depth) + column % PANEL * 4;
    Ints sums = {};
    for (int64_t first = 0; first < depth; first += size)
      sums += round_block(columns + first * num_columns + column, load_lanes(inverse + column),
                          feedback ? feedback + first * size : nullptr, quads + first * PANEL, num_columns, size);
    store_ints(offsets + column, sums * -128);
  }
}

// Spreads each column [depth] over groups of `group` neighbours, as `spread_row` does a row over its whole size. 16 columns
// at a time, with one multiplication by the total factor of the Hadamard transform.
extern "C" void spread_columns_int8(float* columns, int64_t depth, int64_t num_columns, int64_t group) {
  const int64_t power = group & -group, count = group / power;
  const float factor = float(1 / std::sqrt(double(power)));
#pragma omp parallel for
  for (int64_t first = 0; first < num_columns; first += 16) {
    const size_t bytes = sizeof(float) * std::min<int64_t>(16, num_columns - first);
    const float* factors = hartley(count);
    std::vector<Lanes> rows(group);
    for (int64_t start = 0; start < depth; start += group) {
      float* place = columns + start * num_columns + first;
      for (int64_t row = 0; row < group; row++) std::memcpy(&rows[row], place + row * num_columns, bytes);
      for (int64_t width = 1; width < power; width *= 2)
        for (int64_t row = 0; row < group; row++) {
          if (row & width) continue;
          const Lanes a = rows[row], b = rows[row + width];
          rows[row] = a + b, rows[row + width] = a - b;
        }
      for (int64_t row = 0; row < group; row++) {
        Lanes sum = rows[row % power] * factors[row / power * count];
        for (int64_t i = 1; i < count; i++) sum += rows[i * power + row % power] * factors[row / power * count + i];
        sum *= factor;
        std::memcpy(place + row * num_columns, &sum, bytes);
      }
    }
  }
}
