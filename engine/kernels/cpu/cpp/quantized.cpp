// The CPU kernels of quantized weights: decoder layers, the output layer and embeddings, computed as in bf16 or float32.
//
// Compiled when a machine first loads such a model. See engine/kernels/cpu/native_build.py.

#include "linear.h"
#include "quantized/quantized_product.h"
#include "quantized/repack.h"

typedef LinearFormat<Element, QuantizedWeights> QuantizedFormat;
EXPORT_LINEAR(Element, QuantizedWeights, quantized)
EXPORT_LAYERS(QuantizedFormat, quantized)

// Bytes of an `Element`.
extern "C" int element_bytes_quantized() { return int(sizeof(Element)); }

// Bytes of a half panel in a format.
extern "C" int half_bytes_quantized(int kind, int depth) {
  return with_format(kind, [=](auto format) { return depth / format.BLOCK_DEPTH * format.BLOCK_BYTES; });
}

// out: [num_ids, depth], the weights of the columns `ids`.
extern "C" void columns_quantized(const HalfPanel* halves, const int64_t* ids, Element* out, int64_t num_ids, int64_t depth) {
#pragma omp parallel for
  for (int64_t i = 0; i < num_ids; i++) {
    Element* words = panel_buffer(HALF * depth);
    unpack(halves[ids[i] / HALF], depth, words, HALF);
    for (int64_t k = 0; k < depth; k += WORD)
      std::memcpy(static_cast<void*>(out + i * depth + k), words + k * HALF + ids[i] % HALF * WORD, 4);
  }
}

// Repacks rows of a file's tensor as half panels. rows: [16 num_halves], the row of each column, -1 for a column of zeros.
extern "C" void repack_quantized(int64_t kind, const uint8_t* tensor, int64_t row_bytes, const int64_t* rows, uint8_t* out,
                                 int64_t half_bytes, int64_t num_halves, int64_t depth) {
#pragma omp parallel for
  for (int64_t i = 0; i < num_halves; i++) {
    const uint8_t* columns[HALF];
    for (int c = 0; c < HALF; c++) {
      const int64_t row = rows[i * HALF + c];
      columns[c] = row < 0 ? nullptr : tensor + row * row_bytes;
    }
    repack(kind, columns, depth, out + i * half_bytes);
  }
}

// The same for codes [16 num_halves, depth] with scales and zeros [16 num_halves, depth / group]; zeros may be null.
extern "C" void repack_codes_quantized(int64_t kind, const uint8_t* codes, const uint16_t* scales, const uint8_t* zeros,
                                       int64_t group, uint8_t* out, int64_t half_bytes, int64_t num_halves, int64_t depth) {
#pragma omp parallel for
  for (int64_t i = 0; i < num_halves; i++) {
    const int64_t first = i * HALF, at = first * (depth / group);
    repack_codes(kind, codes + first * depth, scales + at, zeros ? zeros + at : nullptr, group, depth, out + i * half_bytes);
  }
}
