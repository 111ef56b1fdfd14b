// Rows in blocks of sizes that compilers know.
#pragma once

#include <algorithm>
#include <type_traits>

namespace {

// Calls f(rows, first) with constants MOST, 8 and 4 for `rows`, none above MOST, so that at least `count` rows are done:
// `count` rounded up to a multiple of 4. 12 rows by two vectors of sums and their operands are what 32 registers hold.
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
