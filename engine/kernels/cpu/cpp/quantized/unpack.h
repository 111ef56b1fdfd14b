// Unpacks half panels of quantized weights to the words that products read.
#pragma once

#include "unpack_floats.h"
#include "unpack_pairs.h"

namespace {

// Word w of column c is written to out[(w * stride + c) * WORD]; so are those of a block by `unpack_block`.
inline void unpack(const HalfPanel& half, int64_t depth, Element* out, int64_t stride) {
  with_format(half.kind, [&](auto format) {
    typedef decltype(format) F;
    const uint8_t* block = half.blocks;
    for (int64_t k = 0; k < depth; k += F::BLOCK_DEPTH, block += F::BLOCK_BYTES) {
      for (int ahead = 0; ahead < F::BLOCK_BYTES; ahead += 64) __builtin_prefetch(block + 4096 + ahead, 0, 2);
      Element* const to = out + k * stride;
      if constexpr (std::is_same<F, PlainFormat>::value) {
        for (int word = 0; word < RUN / WORD; word++)
          std::memcpy(static_cast<void*>(to + word * stride * WORD), block + word * HALF * 4, HALF * 4);
      } else {
        unpack_block<F>(block, to, stride);
      }
    }
  });
}

}  // namespace
