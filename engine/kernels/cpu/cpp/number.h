// Numbers: bf16, exponentials, and the CPU's vector and tile units if it has them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// NO_TILES and NO_VECTORS disable units, to test the code for CPUs without them.
#if !defined(NO_VECTORS) && defined(__AVX512F__)
#include <immintrin.h>
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
#define HAS_AVX512 1
#if !defined(NO_TILES) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#endif

namespace {

constexpr float LOG2E = 1.44269504088896341f;

inline int64_t divide_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }
inline int64_t round_up(int64_t count, int64_t unit) { return divide_up(count, unit) * unit; }

struct bf16 {
  uint16_t bits;
};

// The value whose bytes are at `from`, which need not be aligned.
template <typename Value>
inline Value load_as(const void* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline float as_float(uint32_t bits) { return load_as<float>(&bits); }

inline float load(float x) { return x; }
inline float load(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
inline void store(float& to, float x) { to = x; }
inline void store(bf16& to, float x) {  // to nearest, ties to even
  const uint32_t u = load_as<uint32_t>(&x);
  to.bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// 2^x for x below 127, relative error about 2e-7; 0 below -126. Without branches, so that compilers vectorise it.
inline float exp2_negative(float x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
  const float bounded = x < -126.0f ? -126.0f : x;
  const float shifted = bounded + shift;
  const float f = bounded - (shifted - shift);
  float p = 1.535336188e-4f;
  p = p * f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332548e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.0f;
  const uint32_t power = (load_as<uint32_t>(&shifted) + 127) << 23;
  return x < -126.0f ? 0.0f : p * as_float(power);
}

// 16 floats, or 8 pairs, in one or more registers.
typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

// A register of floats: code whose sums have to stay in registers uses it in place of Lanes.
#if defined(__AVX512F__) && !defined(NO_VECTORS)
constexpr int FLOATS = 16;
#elif defined(__AVX__)
constexpr int FLOATS = 8;
#else
constexpr int FLOATS = 4;
#endif
typedef float Floats __attribute__((vector_size(FLOATS * 4)));
typedef uint32_t Words __attribute__((vector_size(FLOATS * 4)));

#ifdef HAS_AVX512
inline __m512 load_16(const bf16* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

inline void store_16(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, __m256i(_mm512_cvtneps_pbh(x))); }

inline void store_32(bf16* to, __m512 low, __m512 high) { _mm512_storeu_si512(to, __m512i(_mm512_cvtne2ps_pbh(high, low))); }

#endif

inline Lanes load_lanes(const float* from) { return load_as<Lanes>(from); }

inline Lanes load_lanes(const bf16* from) {
#ifdef HAS_AVX512  // g++ 12 converts the halves of a vector one after the other
  return Lanes(load_16(from));
#else
  typedef uint16_t Halves __attribute__((vector_size(32)));
  return Lanes(__builtin_convertvector(load_as<Halves>(from), Bits) << 16);
#endif
}

inline void store_lanes(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

inline void store_floats(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline void store_floats(bf16* to, Floats x) {  // to nearest, ties to even; below 2^-126 to zero
#ifdef HAS_AVX512
  store_16(to, __m512(x));
#else
  const Words words = Words(x), is_normal = Words((words & 0x7f800000) != 0) | 0x80000000;
  typedef uint16_t Halves __attribute__((vector_size(FLOATS * 2)));
  const Halves halves =
      __builtin_convertvector(((words & is_normal) + 0x7fff + ((words >> 16) & 1)) >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

inline void store_lanes(bf16* to, Lanes lanes) {
  const float* const from = reinterpret_cast<const float*>(&lanes);
  for (int i = 0; i < 16; i += FLOATS) store_floats(to + i, load_as<Floats>(from + i));
}

// The sum of all lanes, always in the same order: halves are added to halves.
inline float sum_lanes(Lanes lanes) {
#if !defined(NO_VECTORS) && defined(__AVX512F__)
  return _mm512_reduce_add_ps(__m512(lanes));
#else
  float sums[16];
  store_lanes(sums, lanes);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) sums[i] += sums[i + width];
  return sums[0];
#endif
}

inline Floats load_floats(const float* from) { return load_as<Floats>(from); }

inline Floats load_floats(const bf16* from) {
#ifdef HAS_AVX512  // as in load_lanes
  return Floats(load_16(from));
#else
  typedef uint16_t Halves __attribute__((vector_size(FLOATS * 2)));
  return Floats(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
#endif
}

// Stores registers at `to` and 16 elements further on.
template <typename T>
inline void store_apart(T* to, Floats low, Floats high) {
#ifdef HAS_AVX512
  if constexpr (sizeof(T) == 2) return store_32(to, __m512(low), __m512(high));
#endif
  store_floats(to, low), store_floats(to + 16, high);
}

typedef uint64_t Pairs __attribute__((vector_size(FLOATS * 4)));

inline Floats repeat_pair(const float* from) { return Floats(Pairs{} + load_as<uint64_t>(from)); }

// Keeps a and b in registers: else g++ reads them from memory again for each row, and loads take longer than products.
inline void keep_in_registers(Floats& a, Floats& b) {
#ifdef __x86_64__
  asm("" : "+v"(a), "+v"(b));
#endif
}

// `count` rows of `size` numbers as floats: the rows themselves, or a copy in `memory`, whose stride is then `size`.
inline const float* as_floats(const float* rows, int, int64_t, int64_t&, float*) { return rows; }

inline const float* as_floats(const bf16* rows, int count, int64_t size, int64_t& stride, float* memory) {
  for (int r = 0; r < count; r++)
    for (int64_t i = 0; i < size; i++) memory[r * size + i] = load(rows[r * stride + i]);
  stride = size;
  return memory;
}

inline float silu(float x) {
  const float e = exp2_negative(-std::fabs(x) * LOG2E);  // exp(-|x|)
  return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

#ifdef HAS_AVX512
// 2^x with a polynomial of degree 4, relative error about 4e-6: far below what bf16 keeps.
inline __m512 exp2_16(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 1);  // x - floor(x)
  __m512 p = _mm512_set1_ps(1.3534167e-2f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.2011464e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.41442757e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93003834e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.000002593f));
  return _mm512_scalef_ps(p, x);  // p 2^floor(x)
}
#endif

#ifdef HAS_AMX
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int i = 0; i < 8; i++) row_bytes[i] = 64, rows[i] = 16;
  }
};

// Whether the process may use tiles: it has to ask the operating system once.
bool tiles_granted() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return granted;
}

void load_tile_config() {
  static const TileConfig config;
  _tile_loadconfig(&config);
}
#else
constexpr bool tiles_granted() { return false; }
#endif

// The units that multiply bf16.
enum class Units { plain, vectors, tiles };

inline Units units_here() {
#ifdef HAS_AVX512
  return tiles_granted() ? Units::tiles : Units::vectors;
#else
  return Units::plain;
#endif
}

}  // namespace
