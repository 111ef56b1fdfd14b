// Quantized weights of files, in blocks along the depth with codes of 4 to 8 bits and scales, and their conversion to bf16.
//
// Sixteen columns of a linear layer are stored together, block after block. The parts of a block:
//   scales [16] and, if the format has minima, minima [16]: 16 bits each, half precision or bf16;
//   if scales have fine factors: a byte for each run of weights [runs][16], then likewise for minima;
//   if groups have zeros: zeros [16], a byte each;
//   codes of each 32 weights, in vectors: lane l of vector v is column 8 (v % 2) + l / 2, weight 2 (v / 2) + l % 2.
//   8 bits: [32 vectors][16] signed bytes. Fewer bits: the low four bits, [4][16 lanes], vector v in bits 4 (v % 8) of part
//   v / 8; then a fifth bit, [16 lanes], vector v in bit v; or a fifth and sixth bit, [2][16 lanes], vector v in bits
//   2 (v % 16) of part v / 16.
// A weight is scale (code - zero) - minimum, rounded to float32 after each step as in the gguf package, then to bf16.
#pragma once

#include "../number.h"

#ifdef HAS_AVX512
namespace {

// The same numbers as in engine/kernels/cpu/quantized_formats.py. GROUPED: formats of safetensors files; plus 8 for codes of
// 8 bits, 4 for a zero per group, 2 for groups of 128 instead of 32, 1 for scales in bf16.
enum Kind : int64_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, PAIRS, GROUPED };

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

// Weights that are not quantized: bf16 pairs in the layout of products.
struct PairsFormat {
  static constexpr int BLOCK_DEPTH = RUN, BLOCK_BYTES = RUN * HALF * 2;
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
    default: return f(PairsFormat());
  }
}

// Sixteen columns of a linear layer, made by engine/kernels/cpu/quantized.py.
struct HalfPanel {
  const uint8_t* blocks;
  int64_t kind;
};

// The codes of vector v of a run, minus the format's zero.
template <typename Format>
__attribute__((always_inline)) inline __m512 codes_of(const uint8_t* run, int v) {
  if constexpr (Format::BITS == 8) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(run + v * 16))));
  } else {
    const __m512i low = _mm512_srli_epi32(_mm512_loadu_si512(run + v / 8 * 64), 4 * (v % 8));
    const uint8_t* high = run + Format::LOW_BYTES;
    constexpr float zero = -float(Format::ZERO);
    const __m512 first = _mm512_add_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(zero));
    if constexpr (Format::BITS == 4) return _mm512_permutexvar_ps(low, first);
    // Takes the low four bits from `low`, and the others from `bits`.
    const auto merged = [&](__m512i bits) { return _mm512_ternarylogic_epi32(_mm512_set1_epi32(15), low, bits, 0xca); };
    if constexpr (Format::BITS == 5) {
      const __m512i bits = _mm512_loadu_si512(high);
      const __m512i placed = v < 4 ? _mm512_slli_epi32(bits, v < 4 ? 4 - v : 0) : _mm512_srli_epi32(bits, v < 4 ? 0 : v - 4);
      return _mm512_permutex2var_ps(first, merged(placed), _mm512_add_ps(first, _mm512_set1_ps(16)));
    }
    const __m512i bits = _mm512_loadu_si512(high + v / 16 * 64);
    const int at = 2 * (v % 16);
    const __m512i placed = at < 4 ? _mm512_slli_epi32(bits, at < 4 ? 4 - at : 0) : _mm512_srli_epi32(bits, at < 4 ? 0 : at - 4);
    const __m512i codes = _mm512_and_si512(merged(placed), _mm512_set1_epi32(63));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(Format::ZERO)));
  }
}

// Scales or minima of 16 columns, times the fine factors of run `index` if the format has them.
template <typename Format>
__attribute__((always_inline)) inline __m512 factors(const uint8_t* coarse, const uint8_t* fine, int index) {
  const __m512 of_block =
      Format::IS_BF16 ? load_16((const bf16*)coarse) : _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)coarse));
  if constexpr (Format::FINE == Fine::none) return of_block;
  const __m128i bytes = _mm_loadu_si128((const __m128i*)(fine + index * HALF));
  const __m512i whole = Format::FINE == Fine::signed_bytes ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  return _mm512_mul_ps(of_block, _mm512_cvtepi32_ps(whole));
}

// Unpacks a block of 16 columns to bf16 pairs: out[pair * stride + 2 * column + odd].
template <typename Format>
inline void unpack_block(const uint8_t* block, bf16* out, int64_t stride) {
  const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const uint8_t *minima = block + HALF * 2, *fine = block + (Format::HAS_MIN ? 2 : 1) * HALF * 2, *codes = block + Format::HEAD_BYTES;
  __m512 zero[2];
  if (Format::HAS_ZEROS) {
    const __m512 zeros = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(codes - HALF))));
    zero[0] = _mm512_permutexvar_ps(first, zeros), zero[1] = _mm512_permutexvar_ps(second, zeros);
  }
  for (int from = 0; from < Format::BLOCK_DEPTH; from += RUN, codes += Format::RUN_BYTES) {
    __m512 scale[2], minimum[2];
#pragma GCC unroll 16
    for (int pair = 0; pair < RUN / 2; pair++) {
      if (pair == 0 || (Format::FINE_RUN == 16 && pair == 8)) {
        const int index = (from + 2 * pair) / Format::FINE_RUN;
        const __m512 columns = factors<Format>(block, fine, index);
        scale[0] = _mm512_permutexvar_ps(first, columns), scale[1] = _mm512_permutexvar_ps(second, columns);
        if (Format::HAS_MIN) {
          const __m512 lowest = factors<Format>(minima, fine + Format::FINE_BYTES, index);
          minimum[0] = _mm512_permutexvar_ps(first, lowest), minimum[1] = _mm512_permutexvar_ps(second, lowest);
        }
      }
      __m512 weights[2];
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        weights[h] = codes_of<Format>(codes, 2 * pair + h);
        if (Format::HAS_ZEROS) weights[h] = _mm512_sub_ps(weights[h], zero[h]);
        // With intrinsics that compilers do not fuse.
        weights[h] = _mm512_mul_round_ps(weights[h], scale[h], _MM_FROUND_CUR_DIRECTION);
        if (Format::HAS_MIN) weights[h] = _mm512_sub_round_ps(weights[h], minimum[h], _MM_FROUND_CUR_DIRECTION);
      }
      _mm512_storeu_si512(out + (from / 2 + pair) * stride, __m512i(_mm512_cvtne2ps_pbh(weights[1], weights[0])));
    }
  }
}

template <>
inline void unpack_block<PairsFormat>(const uint8_t* block, bf16* out, int64_t stride) {
  for (int pair = 0; pair < RUN / 2; pair++)
    _mm512_storeu_si512(out + pair * stride, _mm512_loadu_si512(block + pair * 64));
}

// Unpacks 16 columns to bf16 pairs, see `unpack_block`.
inline void unpack(const HalfPanel& half, int64_t depth, bf16* out, int64_t stride) {
  with_format(half.kind, [&](auto format) {
    typedef decltype(format) F;
    const uint8_t* block = half.blocks;
    for (int64_t k = 0; k < depth; k += F::BLOCK_DEPTH, block += F::BLOCK_BYTES) {
      for (int ahead = 0; ahead < F::BLOCK_BYTES; ahead += 64) _mm_prefetch((const char*)block + 4096 + ahead, _MM_HINT_T1);
      unpack_block<F>(block, out + k / 2 * stride, stride);
    }
  });
}

// One block of a column, decoded from a file.
struct Column {
  uint16_t scale = 0, minimum = 0;
  uint8_t fine[16] = {}, fine_minima[8] = {}, zero = 0;
  uint8_t codes[MOST_DEPTH] = {};  // 8 bits: signed

  void read_fine(const uint8_t* from) {  // 6 bits each, of 8 scales and 8 minima
    for (int i = 0; i < 4; i++) {
      fine[i] = from[i] & 63, fine_minima[i] = from[i + 4] & 63;
      fine[i + 4] = uint8_t((from[i + 8] & 15) | (from[i] >> 6 << 4));
      fine_minima[i + 4] = uint8_t((from[i + 8] >> 4) | (from[i + 4] >> 6 << 4));
    }
  }

  // Reads two runs of codes of 4 bits: the low halves of the bytes, then the high ones.
  void read_low(const uint8_t* from, uint8_t* to, int count) {
    for (int i = 0; i < count; i++) to[i] = from[i] & 15, to[i + count] = from[i] >> 4;
  }
};

inline uint16_t load_half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

// Reads a block of a row of a GGUF file; returns its size. Minima that the file adds are negated: they are subtracted here.
inline int read_block(int64_t kind, const uint8_t* from, Column& column) {
  const uint8_t* at = from;
  const auto take_half = [&] { return at += 2, load_half(at - 2); };
  if (kind == Q6_K) {
    const uint8_t *low = at, *high = at + 128;
    for (int part = 0; part < 128; part += 64, low += 64, high += 32)
      for (int i = 0; i < 32; i++) {
        uint8_t* to = column.codes + 2 * part + i;
        to[0] = uint8_t((low[i] & 15) | (high[i] & 3) << 4);
        to[32] = uint8_t((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
        to[64] = uint8_t(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
        to[96] = uint8_t(low[i + 32] >> 4 | high[i] >> 6 << 4);
      }
    std::memcpy(column.fine, from + 192, 16);
    column.scale = load_half(from + 208);
    return 210;
  }
  column.scale = take_half();
  if (kind == Q4_1 || kind == Q5_1) column.minimum = uint16_t(take_half() ^ 0x8000);
  if (kind == Q8_0) {
    std::memcpy(column.codes, at, 32);
    return 34;
  }
  if (kind == Q4_K || kind == Q5_K) {
    column.minimum = take_half();
    column.read_fine(at);
    at += 12;
    const uint8_t* high = at;
    if (kind == Q5_K) at += 32;
    for (int part = 0; part < 4; part++, at += 32) {
      uint8_t* to = column.codes + 64 * part;
      column.read_low(at, to, 32);
      if (kind == Q5_K)
        for (int i = 0; i < 64; i++) to[i] = uint8_t(to[i] | (high[i % 32] >> (2 * part + i / 32) & 1) << 4);
    }
    return int(at - from);
  }
  uint32_t high = 0;
  if (kind == Q5_0 || kind == Q5_1) std::memcpy(&high, at, 4), at += 4;
  column.read_low(at, column.codes, 16);
  for (int i = 0; i < 32; i++) column.codes[i] = uint8_t(column.codes[i] | (high >> i & 1) << 4);
  return int(at + 16 - from);
}

// Writes a block of 16 columns in the layout of `unpack_block`.
template <typename Format>
inline void write_block(const Column (&columns)[HALF], uint8_t* to) {
  std::memset(to, 0, Format::BLOCK_BYTES);
  uint8_t *fine = to + (Format::HAS_MIN ? 2 : 1) * HALF * 2, *run = to + Format::HEAD_BYTES;
  for (int c = 0; c < HALF; c++) {
    std::memcpy(to + 2 * c, &columns[c].scale, 2);
    if (Format::HAS_MIN) std::memcpy(to + 2 * (HALF + c), &columns[c].minimum, 2);
    if (Format::HAS_ZEROS) run[c - HALF] = columns[c].zero;
    for (int i = 0; i < Format::NUM_FINE; i++) {
      fine[i * HALF + c] = columns[c].fine[i];
      if (Format::HAS_MIN) fine[Format::FINE_BYTES + i * HALF + c] = columns[c].fine_minima[i];
    }
  }
  for (int from = 0; from < Format::BLOCK_DEPTH; from += RUN, run += Format::RUN_BYTES) {
    uint32_t low[4][16] = {}, high[2][16] = {};
    for (int v = 0; v < RUN; v++)
      for (int lane = 0; lane < 16; lane++) {
        const uint32_t code = columns[8 * (v % 2) + lane / 2].codes[from + 2 * (v / 2) + lane % 2];
        if (Format::BITS == 8) run[v * 16 + lane] = uint8_t(code);
        low[v / 8][lane] |= (code & 15) << 4 * (v % 8);
        if (Format::BITS == 5) high[0][lane] |= code >> 4 << v;
        if (Format::BITS == 6) high[v / 16][lane] |= code >> 4 << 2 * (v % 16);
      }
    if (Format::BITS == 8) continue;
    std::memcpy(run, low, Format::LOW_BYTES);
    std::memcpy(run + Format::LOW_BYTES, high, Format::HIGH_BYTES);
  }
}

// Repacks 16 rows of a file, null for a row of zeros, in the layout of `unpack`.
inline void repack(int64_t kind, const uint8_t* const (&rows)[HALF], int64_t depth, uint8_t* out) {
  with_format(kind, [&](auto format) {
    typedef decltype(format) F;
    const uint8_t* at[HALF];
    std::memcpy(at, rows, sizeof at);
    Column columns[HALF];
    for (int64_t k = 0; k < depth; k += F::BLOCK_DEPTH, out += F::BLOCK_BYTES) {
      if constexpr (std::is_same<F, PairsFormat>::value) {
        for (int pair = 0; pair < RUN / 2; pair++)
          for (int c = 0; c < HALF; c++)
            if (at[c])
              std::memcpy(out + pair * 64 + c * 4, at[c] + 2 * k + 4 * pair, 4);
            else
              std::memset(out + pair * 64 + c * 4, 0, 4);
      } else {
        for (int c = 0; c < HALF; c++)
          if (at[c]) at[c] += read_block(kind, at[c], columns[c]);
        write_block<F>(columns, out);
      }
    }
  });
}

// Repacks 16 columns of codes [depth] with a scale for each group of `group` weights, and a zero unless `zeros` is null.
inline void repack_codes(int64_t kind, const uint8_t* codes, const uint16_t* scales, const uint8_t* zeros, int64_t group,
                         int64_t depth, uint8_t* out) {
  with_format(kind, [&](auto format) {
    typedef decltype(format) F;
    if constexpr (!std::is_same<F, PairsFormat>::value) {
      Column columns[HALF];
      for (int64_t k = 0; k < depth; k += F::BLOCK_DEPTH, out += F::BLOCK_BYTES) {
        for (int c = 0; c < HALF; c++) {
          const int64_t at = c * (depth / group) + k / group;
          std::memcpy(columns[c].codes, codes + c * depth + k, F::BLOCK_DEPTH);
          columns[c].scale = scales[at];
          if (zeros) columns[c].zero = zeros[at];
        }
        write_block<F>(columns, out);
      }
    }
  });
}

}  // namespace
#endif
