// Int8: products of quads of bytes, and the operations on vectors of 16 that all other int8 code uses.
//
// Sums of products are integers, so their order does not matter. All other operations are elementwise, or in an order that
// does not depend on other rows, and int8.cpp is compiled without contraction of float operations. So results are the same
// bits on every instruction set, for any number of threads and any other rows in the batch.
#pragma once

#include "../number.h"
#include "../rows.h"

#if !defined(NO_VECTORS) && defined(__AVX2__)
#include <immintrin.h>
#elif !defined(NO_VECTORS) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace {

typedef int32_t Ints __attribute__((vector_size(64)));     // 16 sums, or 16 quads of bytes
typedef uint8_t Bytes __attribute__((vector_size(16)));

constexpr int ALIGNED_DEPTH = 64;  // bytes of a row in a tile; rows of bytes are padded to a multiple of it

inline Ints load_ints(const void* from) { return load_as<Ints>(from); }

inline void store_ints(void* to, Ints ints) { std::memcpy(to, &ints, sizeof ints); }

// Stores the low byte of each element.
inline void store_bytes(void* to, Bits bits) {
#if !defined(NO_VECTORS) && defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(__m512i(bits)));
#else
  typedef uint16_t Halves __attribute__((vector_size(32)));
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(bits & 255, Halves), Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
#endif
}

// Stores the second and the first byte of each of 32 elements.
inline void store_low_bytes(const Bits (&bits)[2], uint8_t* second, uint8_t* first) {
#if !defined(NO_VECTORS) && defined(__AVX512VBMI__)
  // Bytes 4 i, then bytes 4 i + 1.
  const __m512i order = _mm512_set_epi8(
      125, 121, 117, 113, 109, 105, 101, 97, 93, 89, 85, 81, 77, 73, 69, 65,
      61, 57, 53, 49, 45, 41, 37, 33, 29, 25, 21, 17, 13, 9, 5, 1,
      124, 120, 116, 112, 108, 104, 100, 96, 92, 88, 84, 80, 76, 72, 68, 64,
      60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
  const __m512i both = _mm512_permutex2var_epi8(__m512i(bits[0]), order, __m512i(bits[1]));
  _mm256_storeu_si256((__m256i*)first, _mm512_castsi512_si256(both));
  _mm256_storeu_si256((__m256i*)second, _mm512_extracti64x4_epi64(both, 1));
#else
  for (int half = 0; half < 2; half++) {
    store_bytes(second + 16 * half, bits[half] >> 8);
    store_bytes(first + 16 * half, bits[half]);
  }
#endif
}

inline Lanes to_lanes(Ints ints) { return __builtin_convertvector(ints, Lanes); }

// f of 16 lanes, register by register: g++ compares wider vectors lane by lane, and keeps them in memory.
template <typename F, typename... Operands>
__attribute__((always_inline)) inline Lanes by_registers(F f, Operands... lanes) {
  Lanes results;
  for (int i = 0; i < 16; i += FLOATS) {
    const Floats part = f(load_floats(reinterpret_cast<const float*>(&lanes) + i)...);
    std::memcpy(reinterpret_cast<float*>(&results) + i, &part, sizeof part);
  }
  return results;
}

inline Floats larger_floats(Floats a, Floats b) {
#if !defined(NO_VECTORS) && defined(__AVX512F__)
  return Floats(_mm512_max_ps(__m512(a), __m512(b)));
#else
  return a > b ? a : b;
#endif
}
inline Lanes larger(Lanes a, Lanes b) { return by_registers(larger_floats, a, b); }

// The larger of `most`, which is not negative, and the magnitude of a.
inline Lanes larger_magnitude(Lanes most, Lanes a) {
#if !defined(NO_VECTORS) && defined(__AVX512DQ__)
  return Lanes(_mm512_range_ps(__m512(most), __m512(a), 0b1011));
#else
  return larger(most, Lanes(Bits(a) & 0x7fffffff));
#endif
}

inline float largest_lane(Lanes lanes) {
#if !defined(NO_VECTORS) && defined(__AVX512F__)
  return _mm512_reduce_max_ps(__m512(lanes));
#else
  float top = lanes[0];
  for (int i = 1; i < 16; i++) top = lanes[i] > top ? lanes[i] : top;
  return top;
#endif
}

// a b + c, rounded once.
inline Floats fused_floats(Floats a, Floats b, Floats c) {
#if !defined(NO_VECTORS) && defined(__AVX512F__)
  return Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif !defined(NO_VECTORS) && defined(__AVX2__) && defined(__FMA__)
  return Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif !defined(NO_VECTORS) && defined(__ARM_FEATURE_DOTPROD)
  return Floats(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
  for (int i = 0; i < FLOATS; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return by_registers(fused_floats, a, b, c); }

// 2^x for x <= 0, relative error about 3e-6; at most 2^-126 for x < -126, how much depends on the processor.
inline Floats exp2_any(Floats x) {
#if !defined(NO_VECTORS) && defined(__AVX512DQ__)
  // Exact, as below: the nearest whole number, not the one below, is taken away, so no bit of f is lost.
  const Floats f = Floats(_mm512_reduce_ps(__m512(x), _MM_FROUND_TO_NEAREST_INT)), whole = x - f;
#else
  x = larger_floats(x, Floats{} - 126.0f);
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats whole = (x + shift) - shift, f = x - whole;
#endif
  Floats p = Floats{} + 9.57010221e-3f;
  p = fused_floats(p, f, Floats{} + 5.59178628e-2f);
  p = fused_floats(p, f, Floats{} + 2.40247443e-1f);
  p = fused_floats(p, f, Floats{} + 6.93121791e-1f);
  p = fused_floats(p, f, Floats{} + 9.99999285e-1f);
#if !defined(NO_VECTORS) && defined(__AVX512DQ__)
  return Floats(_mm512_scalef_ps(__m512(p), __m512(whole)));  // p 2^whole
#else
  typedef int32_t Wholes __attribute__((vector_size(FLOATS * 4)));
  return p * Floats((__builtin_convertvector(whole, Wholes) + 127) << 23);
#endif
}

// The same; 2^-126 for x < -126.
inline Floats exp2_floats(Floats x) { return exp2_any(larger_floats(x, Floats{} - 126.0f)); }
inline Lanes exp2_lanes(Lanes x) { return by_registers(exp2_floats, x); }

// A register of sums, or of quads of bytes. QUAD_ROWS by QUAD_HALVES vectors of 16 sums fit the registers.
#if !defined(NO_VECTORS) && defined(__AVX512VNNI__)
constexpr int REGISTER = 16, QUAD_ROWS = 12, QUAD_HALVES = 2;
#elif !defined(NO_VECTORS) && defined(__AVX2__)
constexpr int REGISTER = 8, QUAD_ROWS = 4, QUAD_HALVES = 1;
#else
constexpr int REGISTER = 4, QUAD_ROWS = 4, QUAD_HALVES = 1;
#endif
typedef int32_t Quads __attribute__((vector_size(REGISTER * 4)));

// The quad at x in all lanes.
inline Quads repeat_quad(const void* x) { return Quads{} + load_as<int32_t>(x); }

// sums[i] += the unsigned bytes 4 i to 4 i + 3 of u times the signed ones of s.
__attribute__((always_inline)) inline Quads add_quads(Quads sums, Quads u, Quads s) {
#if !defined(NO_VECTORS) && defined(__AVX512VNNI__)
  return Quads(_mm512_dpbusd_epi32(__m512i(sums), __m512i(u), __m512i(s)));
#elif !defined(NO_VECTORS) && defined(__AVXVNNI__)
  return Quads(_mm256_dpbusd_avx_epi32(__m256i(sums), __m256i(u), __m256i(s)));
#elif !defined(NO_VECTORS) && defined(__AVX2__)  // pairs of 16 bits: sums of two such products always fit 32
  const __m256i even_u = _mm256_and_si256(__m256i(u), _mm256_set1_epi16(0xff)), odd_u = _mm256_srli_epi16(__m256i(u), 8);
  const __m256i even_s = _mm256_srai_epi16(_mm256_slli_epi16(__m256i(s), 8), 8), odd_s = _mm256_srai_epi16(__m256i(s), 8);
  return sums + (Quads(_mm256_madd_epi16(even_u, even_s)) + Quads(_mm256_madd_epi16(odd_u, odd_s)));
#elif !defined(NO_VECTORS) && defined(__ARM_FEATURE_MATMUL_INT8)
  return Quads(vusdotq_s32(int32x4_t(sums), uint8x16_t(u), int8x16_t(s)));
#elif !defined(NO_VECTORS) && defined(__ARM_FEATURE_DOTPROD)  // u s = (u - 128) s + 64 s + 64 s
  const int8x16_t lower = int8x16_t(u ^ int32_t(0x80808080)), bytes = int8x16_t(s), half = vdupq_n_s8(64);
  const int32x4_t rest = vdotq_s32(vdotq_s32(vdupq_n_s32(0), bytes, half), bytes, half);
  return Quads(vdotq_s32(int32x4_t(sums), lower, bytes)) + Quads(rest);
#else
  for (int shift = 0; shift < 32; shift += 8) sums += ((u >> shift) & 255) * ((s << (24 - shift)) >> 24);
  return sums;
#endif
}

// Sums of R rows for 16 H columns. Loops over sums are unrolled by pragmas: else g++ also keeps sums in memory.
template <int R, int H>
struct QuadSums {
  static constexpr int PARTS = 16 * H / REGISTER;
  Quads sums[PARTS][R];

  // All rows begin with the same sums: from[column].
  __attribute__((always_inline)) void fill_rows(const int32_t* from) {
#pragma GCC unroll 12
    for (int i = 0; i < PARTS; i++)
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) sums[i][r] = load_as<Quads>(from + REGISTER * i);
  }

  // All columns begin with the same sums: from[row].
  __attribute__((always_inline)) void fill_columns(const int32_t* from) {
#pragma GCC unroll 12
    for (int i = 0; i < PARTS; i++)
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) sums[i][r] = Quads{} + from[r];
  }

  // Adds the unsigned quad at x of each row times the signed quads of 16 columns; the next 16 columns are `next` further on.
  __attribute__((always_inline)) void add(const uint8_t* x, int64_t stride, const int8_t* columns, int64_t next) {
    Quads lanes[PARTS];
    for (int i = 0; i < PARTS; i++) lanes[i] = load_as<Quads>(columns + i * REGISTER / 16 * next + i * REGISTER % 16 * 4);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Quads quad = repeat_quad(x + r * stride);
      for (int i = 0; i < PARTS; i++) sums[i][r] = add_quads(sums[i][r], quad, lanes[i]);
    }
  }

  // The same with signed rows; the signed columns become unsigned by adding 128.
  __attribute__((always_inline)) void add(const int8_t* x, int64_t stride, const int8_t* columns, int64_t next) {
    Quads lanes[PARTS];
    for (int i = 0; i < PARTS; i++)
      lanes[i] = load_as<Quads>(columns + i * REGISTER / 16 * next + i * REGISTER % 16 * 4) ^ int32_t(0x80808080);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Quads quad = repeat_quad(x + r * stride);
      for (int i = 0; i < PARTS; i++) sums[i][r] = add_quads(sums[i][r], lanes[i], quad);
    }
  }

  __attribute__((always_inline)) void store(int32_t* to, int64_t stride) const {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 12
      for (int i = 0; i < PARTS; i++) std::memcpy(to + r * stride + REGISTER * i, &sums[i][r], sizeof(Quads));
  }
};

// The scale of bytes, so that the largest magnitude becomes 127, and its inverse.
inline float byte_scale(float most) { return most / 127.0f; }
inline float inverse_scale(float most) { return most > 0 ? 127.0f / most : 0.0f; }

// 128 + x / scale in the low byte of each lane: adding 1.5 * 2^23, whose low byte is 0, rounds to an integer.
inline Bits to_bytes(Lanes x, float inverse) { return Bits(x * inverse + (12582912.0f + 128.0f)); }

}  // namespace
