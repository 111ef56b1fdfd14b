// Loops over rows in blocks whose size is a compile-time constant.
#pragma once

#include <algorithm>
#include <type_traits>

namespace {

// Calls f(rows, first) for blocks of MOST, 8 or 4 rows, which cover `count` rows rounded up to a multiple of 4; `rows` is a
// constant. The sums of 12 rows by two vectors, and their operands, fit 32 registers.
template <int MOST = 12, typename F>
__attribute__((always_inline)) inline void by_rows(int count, F f) {
  int first = 0;
  for (; count - first > MOST - 4; first += MOST) f(std::integral_constant<int, MOST>(), first);
  if (MOST > 8 && count - first > 4)
    f(std::integral_constant<int, std::min(MOST, 8)>(), first);
  else if (MOST > 4 && count > first)
    f(std::integral_constant<int, 4>(), first);
}

}  // namespace
