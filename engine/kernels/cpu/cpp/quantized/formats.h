// Quantized weights of files, in blocks along the depth with codes of 4 to 8 bits and scales, and the layout in memory.
//
// Sixteen columns of a linear layer are stored together, block after block. The parts of a block:
//   scales [16] and, if the format has minima, minima [16]: 16 bits each, half precision or bf16;
//   if scales have fine factors: a byte for each run of weights [runs][16], then likewise for minima;
//   if groups have zeros: zeros [16], a byte each;
//   codes of each 32 weights, in 32 vectors of 16 lanes; `lane_column` and `lane_weight` say which code a lane has.
//   8 bits: signed bytes, [32 vectors][16] for bf16, else [8][16 lanes][4], vector v in byte v % 4 of part v / 4. Fewer
//   bits: the low four bits, [4][16 lanes], vector v in bits 4 (v % 8) of part v / 8; then a fifth bit, [16 lanes], vector
//   v in bit v; or a fifth and sixth bit, [2][16 lanes], vector v in bits 2 (v % 16) of part v / 16.
// A weight is scale (code - zero) - minimum, rounded to float32 after each step as in the gguf package, then to `Element`.
#pragma once

#include "../number.h"

namespace {

// What products compute in: bf16 where vectors multiply its pairs, else float32. A word of four bytes has a pair or a float.
#ifdef HAS_AVX512
typedef bf16 Element;
constexpr int WORD = 2;
#else
typedef float Element;
constexpr int WORD = 1;
#endif

// The same numbers as in engine/kernels/cpu/quantized.py. GROUPED: formats of safetensors files; plus 8 for codes of 8 bits,
// 4 for a zero per group, 2 for groups of 128 instead of 32, 1 for scales in bf16.
enum Kind : int64_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, PLAIN, GROUPED };

constexpr int HALF = 16;       // columns that are stored together: half a panel
constexpr int RUN = 32;        // weights of a column that one iteration unpacks
constexpr int MOST_DEPTH = 256;  // most weights of a column in a block

enum class Fine { none, unsigned_bytes, signed_bytes };

template <int BITS_, int ZERO_, bool HAS_MIN_, Fine FINE_, int BLOCK_DEPTH_, int FINE_RUN_ = 32, bool IS_BF16_ = false,
          bool HAS_ZEROS_ = false>
struct Format {
  static constexpr int BITS = BITS_, ZERO = ZERO_, BLOCK_DEPTH = BLOCK_DEPTH_;
  static constexpr bool HAS_MIN = HAS_MIN_, IS_BF16 = IS_BF16_, HAS_ZEROS = HAS_ZEROS_;
  static constexpr Fine FINE = FINE_;
  static constexpr int FINE_RUN = FINE_RUN_;
  static constexpr int NUM_FINE = FINE == Fine::none ? 0 : BLOCK_DEPTH / FINE_RUN;
  static constexpr int FINE_BYTES = NUM_FINE * HALF;
  static constexpr int HEAD_BYTES = (HAS_MIN ? 2 : 1) * (HALF * 2 + FINE_BYTES) + (HAS_ZEROS ? HALF : 0);
  static constexpr int LOW_BYTES = BITS == 8 ? RUN * HALF : RUN * HALF / 2;
  static constexpr int HIGH_BYTES = BITS == 8 ? 0 : (BITS - 4) * RUN * HALF / 8;
  static constexpr int RUN_BYTES = LOW_BYTES + HIGH_BYTES;
  static constexpr int BLOCK_BYTES = HEAD_BYTES + BLOCK_DEPTH / RUN * RUN_BYTES;
};

// Weights that are not quantized: words in the layout of products, [words of the depth][16 columns].
struct PlainFormat {
  static constexpr int BLOCK_DEPTH = RUN, BLOCK_BYTES = RUN * HALF * int(sizeof(Element));
};

template <int DEPTH, bool IS_BF16>
using Grouped = Format<4, 8, false, Fine::none, DEPTH, DEPTH, IS_BF16>;
template <int DEPTH, bool IS_BF16>
using GroupedWithZeros = Format<4, 0, false, Fine::none, DEPTH, DEPTH, IS_BF16, true>;
template <int DEPTH, bool IS_BF16>
using GroupedBytes = Format<8, 0, false, Fine::none, DEPTH, DEPTH, IS_BF16>;

// Calls f with the format of a kind.
template <typename F>
inline auto with_format(int64_t kind, F f) {
  switch (kind) {
    case Q4_0: return f(Format<4, 8, false, Fine::none, 32>());
    case Q4_1: return f(Format<4, 0, true, Fine::none, 32>());
    case Q5_0: return f(Format<5, 16, false, Fine::none, 32>());
    case Q5_1: return f(Format<5, 0, true, Fine::none, 32>());
    case Q8_0: return f(Format<8, 0, false, Fine::none, 32>());
    case Q4_K: return f(Format<4, 0, true, Fine::unsigned_bytes, 256>());
    case Q5_K: return f(Format<5, 0, true, Fine::unsigned_bytes, 256>());
    case Q6_K: return f(Format<6, 32, false, Fine::signed_bytes, 256, 16>());
    case GROUPED: return f(Grouped<32, false>());
    case GROUPED + 1: return f(Grouped<32, true>());
    case GROUPED + 2: return f(Grouped<128, false>());
    case GROUPED + 3: return f(Grouped<128, true>());
    case GROUPED + 4: return f(GroupedWithZeros<32, false>());
    case GROUPED + 5: return f(GroupedWithZeros<32, true>());
    case GROUPED + 6: return f(GroupedWithZeros<128, false>());
    case GROUPED + 7: return f(GroupedWithZeros<128, true>());
    case GROUPED + 8: return f(GroupedBytes<32, false>());
    case GROUPED + 9: return f(GroupedBytes<32, true>());
    case GROUPED + 10: return f(GroupedBytes<128, false>());
    case GROUPED + 11: return f(GroupedBytes<128, true>());
    default: return f(PlainFormat());
  }
}

// Sixteen columns of a linear layer, made by engine/kernels/cpu/quantized.py.
struct HalfPanel {
  const uint8_t* blocks;
  int64_t kind;
};

}  // namespace
