// Unpacks blocks of quantized weights to float32, on vectors of any width.
#pragma once

#include "formats.h"

#ifndef HAS_AVX512
namespace {

constexpr int lane_column(int, int lane) { return lane; }
constexpr int lane_weight(int vector, int) { return vector; }

typedef int32_t Integers __attribute__((vector_size(FLOATS * 4)));

// Keeps the compiler from fusing the product with a later sum, which would round once instead of twice.
inline Floats rounded(Floats product) {
#if defined(__x86_64__)
  __asm__("" : "+x"(product));
#elif defined(__aarch64__)
  __asm__("" : "+w"(product));
#else
  __asm__("" : "+m"(product));
#endif
  return product;
}

// Scales or minima of blocks, of the columns from `column` on.
template <typename Format>
inline Floats block_factors(const uint8_t* coarse, int column) {
  typedef uint16_t Halves __attribute__((vector_size(FLOATS * 2)));
  if (Format::IS_BF16) return load_floats(reinterpret_cast<const bf16*>(coarse) + column);
  const Words bits = __builtin_convertvector(load_as<Halves>(coarse + 2 * column), Words);
  const Words magnitude = (bits & 0x7fff) << 13, is_infinite = Words((bits & 0x7c00) == 0x7c00);
  const Floats finite = Floats(magnitude) * 0x1p112f;  // corrects the bias of the exponent
  return Floats(Words(finite) | (is_infinite & 0x7f800000) | (bits & 0x8000) << 16);
}

template <typename Byte>
inline Floats load_bytes(const uint8_t* from) {
  typedef Byte Bytes __attribute__((vector_size(FLOATS)));
  return __builtin_convertvector(load_as<Bytes>(from), Floats);
}

// The fine factors of the columns from `column` on, of run `index`.
template <typename Format>
inline Floats fine_factors(const uint8_t* fine, int index, int column) {
  typedef typename std::conditional<Format::FINE == Fine::signed_bytes, int8_t, uint8_t>::type Byte;
  return load_bytes<Byte>(fine + index * HALF + column);
}

// The codes of vector v of a run, minus the format's zero, of the columns from `column` on.
template <typename Format>
__attribute__((always_inline)) inline Floats codes_of(const uint8_t* run, int v, int column) {
  const auto words = [=](const uint8_t* part) __attribute__((always_inline)) { return load_as<Integers>(part + column * 4); };
  if constexpr (Format::BITS == 8)
    return __builtin_convertvector(words(run + v / 4 * 64) << (24 - 8 * (v % 4)) >> 24, Floats);
  Integers codes = words(run + v / 8 * 64) >> 4 * (v % 8) & 15;
  const uint8_t* high = run + Format::LOW_BYTES;
  if constexpr (Format::BITS == 5) codes |= (words(high) >> v & 1) << 4;
  if constexpr (Format::BITS == 6) codes |= (words(high + v / 16 * 64) >> 2 * (v % 16) & 3) << 4;
  return __builtin_convertvector(codes - Format::ZERO, Floats);
}

// See unpack.h.
template <typename Format>
inline void unpack_block(const uint8_t* block, float* out, int64_t stride) {
  const uint8_t *minima = block + HALF * 2, *fine = block + (Format::HAS_MIN ? 2 : 1) * HALF * 2;
  for (int column = 0; column < HALF; column += FLOATS) {
    const uint8_t* codes = block + Format::HEAD_BYTES;
    const Floats zero = Format::HAS_ZEROS ? load_bytes<uint8_t>(codes - HALF + column) : Floats{};
    const Floats block_scale = block_factors<Format>(block, column);
    const Floats block_minimum = Format::HAS_MIN ? block_factors<Format>(minima, column) : Floats{};
    for (int from = 0; from < Format::BLOCK_DEPTH; from += RUN, codes += Format::RUN_BYTES) {
      Floats scale = block_scale, minimum = block_minimum;
#pragma GCC unroll 32
      for (int v = 0; v < RUN; v++) {
        if (Format::FINE != Fine::none && v % Format::FINE_RUN == 0) {
          const int run = (from + v) / Format::FINE_RUN;
          scale = block_scale * fine_factors<Format>(fine, run, column);
          if (Format::HAS_MIN) minimum = block_minimum * fine_factors<Format>(fine + Format::FINE_BYTES, run, column);
        }
        Floats weights = codes_of<Format>(codes, v, column);
        if (Format::HAS_ZEROS) weights -= zero;
        weights *= scale;
        if (Format::HAS_MIN) weights = rounded(weights) - minimum;
        std::memcpy(out + (from + v) * stride + column, &weights, sizeof weights);
      }
    }
  }
}

}  // namespace
#endif
