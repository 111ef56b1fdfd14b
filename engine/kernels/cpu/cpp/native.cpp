// The CPU kernels of decoder layers, for the element types bf16 and float.
//
// Compiled once per machine by engine/kernels/cpu/native_build.py. bf16 products run on AMX tiles if the CPU has them, else
// on AVX-512 vectors of bf16 pairs, else in float32. Python calls what is exported here.
#include "draw.h"
#include "linear.h"

// For tests, as all layers norm rows within one call.
#define EXPORT_NORM(T, suffix)                                                                                            \
  extern "C" void rms_norm_##suffix(const T* x, const T* weight, T* out, int64_t num_rows, int64_t size, float epsilon) { \
    rms_norm(x, weight, out, num_rows, size, epsilon);                                                                    \
  }

typedef LinearFormat<float, PanelWeights<float>> FloatFormat;
EXPORT_ATTENTION(float, float, float, float32)
EXPORT_NORM(float, float32)
EXPORT_LINEAR(float, PanelWeights<float>, float32)
EXPORT_LAYERS(FloatFormat, float32)

EXPORT_ATTENTION(bf16, bf16, bf16, bf16)
EXPORT_NORM(bf16, bf16)
typedef LinearFormat<bf16, PanelWeights<bf16>> PairFormat;
EXPORT_LINEAR(bf16, PanelWeights<bf16>, bf16)
EXPORT_LAYERS(PairFormat, bf16)

// Output columns of a panel whose weights are stored together, see word_index.
extern "C" int columns_together_float32() { return PanelProduct<float>::Operands::TOGETHER; }
extern "C" int columns_together_bf16() { return PanelProduct<bf16>::Operands::TOGETHER; }
