// Repacks rows of files in the layout of formats.h.
#pragma once

#include "unpack.h"

namespace {

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

// Reads a block of a row of a GGUF file; returns its size. Minima that the file adds are negated: they are subtracted here.
inline int read_block(int64_t kind, const uint8_t* from, Column& column) {
  const uint8_t* at = from;
  const auto take_half = [&] { return at += 2, load_as<uint16_t>(at - 2); };
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
    column.scale = load_as<uint16_t>(from + 208);
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
        const uint32_t code = columns[lane_column(v, lane)].codes[from + lane_weight(v, lane)];
        if (Format::BITS == 8) run[WORD == 2 ? v * 16 + lane : v / 4 * 64 + lane * 4 + v % 4] = uint8_t(code);
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
      if constexpr (std::is_same<F, PlainFormat>::value) {
        for (int word = 0; word < RUN / WORD; word++)
          for (int c = 0; c < HALF; c++)
            if (at[c])
              std::memcpy(out + (word * HALF + c) * 4, at[c] + k * int64_t(sizeof(Element)) + word * 4, 4);
            else
              std::memset(out + (word * HALF + c) * 4, 0, 4);
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
    if constexpr (!std::is_same<F, PlainFormat>::value) {
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
