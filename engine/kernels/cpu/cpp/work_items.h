// What attention takes: its shape, the rule of a layer, and a step's work in items, of which a thread computes one for one
// KV head at a time. engine/kernels/cpu/layer_structures.py has the same fields, and describes the arrays.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstring>
#include <memory>

namespace {

struct AttentionShape {
  int32_t num_q_heads, num_kv_heads, dim, block_size;

  int group() const { return num_q_heads / num_kv_heads; }
  int64_t q_size() const { return int64_t(num_q_heads) * dim; }
  int64_t kv_size() const { return int64_t(num_kv_heads) * dim; }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
};

// How a layer turns scores into weights; 0 or null if absent.
struct Scoring {
  float scale, softcap;  // c: scores become c tanh(score / c)
  int32_t window;        // tokens that a row sees, its own included
  const float* sinks;    // [num_q_heads], one more score per head in the softmax, which has no value
};

// shared, own: [num_shared, SHARED_COLUMNS] and [num_own, OWN_COLUMNS].
struct AttentionWork {
  const int64_t *slots, *shared, *own;
  const int32_t *prefix_blocks, *own_blocks, *own_seen;
  float* state;
  int64_t num_rows, num_shared, num_own;

  // Whether there is such a row, and its KV is not beside that of the row before it.
  bool is_elsewhere(int64_t row) const { return row < num_rows && slots[row] != slots[row - 1] + 1; }
};

enum { SHARED_ROW, SHARED_COUNT, SHARED_TABLE, SHARED_LENGTH, SHARED_COLUMNS };
// OWN_VISIBLE: own tokens that the first row sees; OWN_NUM_SHARED: tokens that a shared item has covered.
enum { OWN_ROW, OWN_COUNT, OWN_TABLE, OWN_VISIBLE, OWN_PREFIX_TABLE, OWN_PREFIX_LENGTH, OWN_NUM_SHARED, OWN_COLUMNS };

// Prefetches cache lines that are written soon.
inline void fetch_to_write(const void* to, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(static_cast<const char*>(to) + i, 1, 2);
}

// How many KV heads of an item a thread takes one after the other: all if there are items enough for all threads, since the
// heads of a block are neighbours in memory, and what is fetched ahead of one head belongs to the next.
inline int heads_at_once(int64_t num_items, int num_kv_heads) {
  return num_items >= 4 * omp_get_num_threads() ? num_kv_heads : 1;
}

// A thread's workspace. A pointer, because every access to a thread_local object itself would call a function for its
// address.
template <typename W>
W& workspace() {
  static thread_local const auto own = std::make_unique<W>();
  return *own;
}

// The state that shared items pass to own items: for each row and query head the running maximum, sum and output, [dim + 2].
// W: a workspace with the members top, sum and out; its row r is token first_row + r / group, query head r % group of `head`.
struct RowStates {
  float* state;
  int num_q_heads, group, dim;

  float* of(int64_t first_row, int head, int r) const {
    return state + ((first_row + r / group) * num_q_heads + head * group + r % group) * (dim + 2);
  }

  template <typename W>
  void keep(const W& w, int r, int64_t first_row, int head) const {
    float* to = of(first_row, head, r);
    to[0] = w.top[r], to[1] = w.sum[r];
    std::memcpy(to + 2, w.out + r * dim, dim * sizeof(float));
  }

  template <typename W>
  void take(W& w, int r, int64_t first_row, int head) const {
    const float* from = of(first_row, head, r);
    w.top[r] = from[0], w.sum[r] = from[1];
    std::memcpy(w.out + r * dim, from + 2, dim * sizeof(float));
  }
};

}  // namespace
