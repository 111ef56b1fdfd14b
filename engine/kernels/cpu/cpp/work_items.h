// What one thread does of a step's attention for one KV head: int64 rows of SHARED or OWN columns.
// engine/kernels/cpu/native_work.py makes them.
#pragma once

#include <cstdint>

namespace {

// What a layer's attention does besides scaling its scores. 0 and null stand for nothing.
struct AttentionRule {
  float softcap;       // c: scores become c tanh(score / c)
  int window;          // tokens that a row sees, its own included
  const float* sinks;  // [num_q_heads], a score without a value: it takes its share of the weights
};

enum { SHARED_ROW, SHARED_COUNT, SHARED_TABLE, SHARED_LENGTH, SHARED_COLUMNS };
// OWN_VISIBLE: own tokens that the first row sees; OWN_NUM_SHARED: tokens that a shared item has attended to.
enum { OWN_ROW, OWN_COUNT, OWN_TABLE, OWN_VISIBLE, OWN_PREFIX_TABLE, OWN_PREFIX_LENGTH, OWN_NUM_SHARED, OWN_COLUMNS };

}  // namespace
