// Loops over rows in blocks whose size is a compile-time constant.
#pragma once

#include <algorithm>
#include <type_traits>

namespace {

// Rows whose sums in float32, by two vectors, fit the registers with their operands.
#if defined(__AVX512F__) && !defined(NO_VECTORS)
constexpr int FLOAT_ROWS = 12;
#elif defined(__aarch64__)
constexpr int FLOAT_ROWS = 8;
#elif defined(__AVX2__) && !defined(NO_VECTORS)
constexpr int FLOAT_ROWS = 6;
#else
constexpr int FLOAT_ROWS = 4;
#endif

// Calls f(rows, first) for blocks of MOST, 8 or 4 rows, or of 6 and 4, which cover `count` rows rounded up to a multiple of 4;
// `rows` is a constant. The sums of 12 rows by two vectors, and their operands, fit 32 registers, those of 6 rows 16.
template <int MOST = 12, typename F>
__attribute__((always_inline)) inline void by_rows(int count, F f) {
  int first = 0;
  if constexpr (MOST == 6) {
    for (; count - first > 8; first += 12)
      for (int half = 0; half < 12; half += 6) f(std::integral_constant<int, 6>(), first + half);
    for (; count > first; first += 4) f(std::integral_constant<int, 4>(), first);
  } else {
    for (; count - first > MOST - 4; first += MOST) f(std::integral_constant<int, MOST>(), first);
    if (MOST > 8 && count - first > 4)
      f(std::integral_constant<int, std::min(MOST, 8)>(), first);
    else if (MOST > 4 && count > first)
      f(std::integral_constant<int, 4>(), first);
  }
}

}  // namespace
