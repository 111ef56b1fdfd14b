// Unpacks blocks of quantized weights to bf16 pairs, on AVX-512 vectors.
#pragma once

#include "formats.h"

#ifdef HAS_AVX512
namespace {

constexpr int lane_column(int vector, int lane) { return 8 * (vector % 2) + lane / 2; }
constexpr int lane_weight(int vector, int lane) { return 2 * (vector / 2) + lane % 2; }

// The codes of vector v of a run, minus the format's zero.
template <typename Format>
__attribute__((always_inline)) inline __m512 codes_of(const uint8_t* run, int v) {
  if constexpr (Format::BITS == 8) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(run + v * 16))));
  } else {
    const __m512i low = _mm512_srli_epi32(_mm512_loadu_si512(run + v / 8 * 64), 4 * (v % 8));
    const uint8_t* high = run + Format::LOW_BYTES;
    constexpr float zero = -float(Format::ZERO);
    const __m512 first = _mm512_add_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                       _mm512_set1_ps(zero));
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

// See unpack.h.
template <typename Format>
inline void unpack_block(const uint8_t* block, bf16* out, int64_t stride) {
  const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const uint8_t *minima = block + HALF * 2, *fine = block + (Format::HAS_MIN ? 2 : 1) * HALF * 2;
  const uint8_t* codes = block + Format::HEAD_BYTES;
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
      _mm512_storeu_si512(out + (from / 2 + pair) * stride * WORD, __m512i(_mm512_cvtne2ps_pbh(weights[1], weights[0])));
    }
  }
}

}  // namespace
#endif
