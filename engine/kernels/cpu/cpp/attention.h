// Prefix-shared attention over paged KV (RelayAttention section 3.2, BatchLLM Eq. 1).
//
// KV layout. A KV block has, for each head, sub-blocks of 32 tokens, in the order in which a tile product reads them:
//   keys   [2 halves of 16 tokens][D / 2][16 tokens][2]   (pairs along the head dim)
//   values [16 pairs of tokens][D][2]                     (pairs along the tokens)
// A block has the size of [block_size, num_kv_heads, D], so code that copies whole blocks need not know the layout.
//
// There are no log-sum-exps: a row's running maximum, sum and output are carried from its prefix to its own part. The maximum
// need not be exact, since a weight may be up to 2^SLACK: so it is hardly ever raised, and the output hardly ever rescaled.
#pragma once

#include "pairs.h"
#include "rows.h"
#include "work_items.h"

namespace {

constexpr int SUB = 32;        // tokens in a sub-block of KV
constexpr int ROWS = 32;       // query rows of a tile: tokens x query heads of one KV head
constexpr int CHUNK = 256;     // KV tokens whose values are multiplied at once
constexpr int SPAN = 64;       // KV tokens whose scores become weights at once, while they are in the first-level cache
constexpr int MAX_DIM = 256;   // largest head dim
constexpr float SLACK = 8;     // in the exponent of 2: how far a score may be above its row's running maximum
constexpr float NO_TOP = -1e30f;  // the running maximum of a row that has not seen any token

template <typename T>
struct alignas(64) Workspace {
  T q[ROWS * MAX_DIM];
  float scores[ROWS * SPAN];
  T weights[ROWS * CHUNK];
  float out[ROWS * MAX_DIM];
  float top[ROWS];
  float sum[ROWS];
  Lanes sums[ROWS];     // of a chunk's weights, by lane
  int lowest[ROWS];     // with a window: the first token of the prefix, or of the own part, that each row sees
};

// Sums of R rows times the pairs of some of 16 columns, in registers.
template <int R>
struct PairSums {
  static constexpr int WIDTH = 2 * FLOATS;  // of 32: both elements of 16 pairs
  Floats sums[2][R] = {};

  // Adds the pair at x of each row times pairs of columns.
  template <typename T>
  __attribute__((always_inline)) void add(const float* x, int64_t stride, const T* columns) {
    Floats low = load_floats(columns), high = load_floats(columns + FLOATS);
    keep_in_registers(low, high);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Floats pair = repeat_pair(x + r * stride);
      sums[0][r] += pair * low, sums[1][r] += pair * high;
    }
  }

  void store(float (&to)[R][32], int at) const {
    for (int r = 0; r < R; r++) store_floats(to[r] + at, sums[0][r]), store_floats(to[r] + at + FLOATS, sums[1][r]);
  }
};

// scores[r][0..32) = q[r] . keys of a sub-block, for rows rounded up to a multiple of 4. Row stride of scores: SPAN.
template <typename T>
void score_plain(const T* q, const T* keys, float* scores, int num_rows, int dim) {
  by_rows<FLOAT_ROWS>(num_rows, [=](auto rows, int first) {
    float memory[rows * MAX_DIM];
    int64_t stride = dim;
    const float* const x = as_floats(q + first * dim, rows, dim, stride, memory);
    for (int half = 0; half < 2; half++) {
      float pairs[rows][32];
      for (int at = 0; at < 32; at += PairSums<rows>::WIDTH) {
        PairSums<rows> sums;
        for (int d = 0; d < dim; d += 2) sums.add(x + d, stride, keys + (half * dim + d) * 16 + at);
        sums.store(pairs, at);
      }
      for (int r = 0; r < rows; r++)
        for (int j = 0; j < 16; j++) scores[(first + r) * SPAN + half * 16 + j] = pairs[r][2 * j] + pairs[r][2 * j + 1];
    }
  });
}

// out[r] += weights[r] . values of all sub-blocks of a chunk, for rows as above. Row stride of weights: CHUNK.
template <typename T>
void weigh_plain(const T* weights, const T* const* values, int num_subs, float* out, int num_rows, int dim) {
  by_rows<FLOAT_ROWS>(num_rows, [=](auto rows, int first) {
    float memory[rows * CHUNK];
    int64_t stride = CHUNK;
    const float* const x = as_floats(weights + first * CHUNK, rows, num_subs * SUB, stride, memory);
    for (int d = 0; d < dim; d += 16) {
      float pairs[rows][32];
      for (int at = 0; at < 32; at += PairSums<rows>::WIDTH) {
        PairSums<rows> sums;
        for (int s = 0; s < num_subs; s++)
          for (int pair = 0; pair < SUB / 2; pair++)
            sums.add(x + s * SUB + 2 * pair, stride, values[s] + 2 * (pair * dim + d) + at);
        sums.store(pairs, at);
      }
      for (int r = 0; r < rows; r++)
        for (int j = 0; j < 16; j++) out[(first + r) * dim + d + j] += pairs[r][2 * j] + pairs[r][2 * j + 1];
    }
  });
}

#ifdef HAS_AMX
void score_tiles(const bf16* q, const bf16* keys, float* scores, bool both, int dim) {
  _tile_zero(0);
  _tile_zero(1);
  if (both) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int d = 0; d < dim; d += 32) {
    _tile_loadd(4, q + d, dim * 2);
    _tile_loadd(6, keys + d * 16, 64);
    _tile_loadd(7, keys + 16 * dim + d * 16, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, q + 16 * dim + d, dim * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, scores, SPAN * 4);
  _tile_stored(1, scores + 16, SPAN * 4);
  if (both) {
    _tile_stored(2, scores + 16 * SPAN, SPAN * 4);
    _tile_stored(3, scores + 16 * SPAN + 16, SPAN * 4);
  }
}

// All sub-blocks of a chunk at once, so that the output stays in tiles.
void weigh_tiles(const bf16* weights, const bf16* const* values, int num_subs, float* out, bool both, int dim) {
  for (int d = 0; d < dim; d += 32) {
    _tile_loadd(0, out + d, dim * 4);
    _tile_loadd(1, out + d + 16, dim * 4);
    if (both) {
      _tile_loadd(2, out + 16 * dim + d, dim * 4);
      _tile_loadd(3, out + 16 * dim + d + 16, dim * 4);
    }
    for (int s = 0; s < num_subs; s++) {
      _tile_loadd(4, weights + s * SUB, CHUNK * 2);
      _tile_loadd(6, values[s] + 2 * d, dim * 4);
      _tile_loadd(7, values[s] + 2 * (d + 16), dim * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (both) {
        _tile_loadd(5, weights + 16 * CHUNK + s * SUB, CHUNK * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out + d, dim * 4);
    _tile_stored(1, out + d + 16, dim * 4);
    if (both) {
      _tile_stored(2, out + 16 * dim + d, dim * 4);
      _tile_stored(3, out + 16 * dim + d + 16, dim * 4);
    }
  }
}
#endif

#ifdef HAS_AVX512
template <int H>
void score_halves(const bf16* q, const bf16* keys, float* scores, int num_rows, int dim) {
  by_rows(num_rows, [=](auto rows, int first) {
    RowSums<rows, H> sums;
    sums.clear();
    for (int d = 0; d < dim; d += 2) sums.add(q + first * dim + d, dim, keys + d * 16, dim * 16);
    sums.store(scores + first * SPAN, SPAN);
  });
}

// The same on vectors. Only the first half of a sub-block is computed if it has at most 16 tokens.
void score_vectors(const bf16* q, const bf16* keys, float* scores, int num_rows, int count, int dim) {
  if (count > 16)
    score_halves<2>(q, keys, scores, num_rows, dim);
  else
    score_halves<1>(q, keys, scores, num_rows, dim);
}

// out += weights . values of all tokens of a chunk, so that the output stays in registers.
void weigh_vectors(const bf16* weights, const bf16* const* values, int count, float* out, int num_rows, int dim) {
  by_rows(num_rows, [=](auto rows, int first) {
    for (int d = 0; d < dim; d += 32) {
      RowSums<rows> sums;
      sums.load(out + first * dim + d, dim);
      for (int token = 0; token < count; token += SUB) {
        const bf16* from = weights + first * CHUNK + token;
        const bf16* columns = values[token / SUB] + 2 * d;
        for (int i = 0; i < std::min(SUB, count - token); i += 2)
          sums.add(from + i, CHUNK, columns + i * dim, 32);
      }
      sums.store(out + first * dim + d, dim);
    }
  });
}
#endif

inline float largest(const float* x, int count) {
#ifdef HAS_AVX512
  __m512 a = _mm512_set1_ps(-3e38f), b = a;
  int j = 0;
  for (; j + 32 <= count; j += 32) {
    a = _mm512_max_ps(a, _mm512_load_ps(x + j));
    b = _mm512_max_ps(b, _mm512_load_ps(x + j + 16));
  }
  for (; j < count; j += 16)
    a = _mm512_mask_max_ps(a, count - j >= 16 ? 0xffff : (1 << (count - j)) - 1, a, _mm512_load_ps(x + j));
  return _mm512_reduce_max_ps(_mm512_max_ps(a, b));
#else
  float top = x[0];
#pragma omp simd reduction(max : top)
  for (int j = 0; j < count; j++) top = x[j] > top ? x[j] : top;
  return top;
#endif
}

// weights[j] = 2^(scores[j] scale - top) for j below count, 0 from there to `width`; adds them to `sums`. False, and nothing
// changes, if a weight would exceed 2^slack.
template <typename T>
bool exponentiate(const float* scores, T* weights, int count, int width, float scale, float top, float slack, Lanes& sums) {
  if (count && largest(scores, count) * scale - top > slack) return false;
  std::memset(static_cast<void*>(weights + count), 0, (width - count) * sizeof(T));
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < count; j++) {
    const float e = exp2_negative(scores[j] * scale - top);
    sum += e;
    store(weights[j], e);
  }
  sums[0] += sum;
  return true;
}

#ifdef HAS_AVX512
// Of the first N vectors of 16 scores; more than 16 (N - 2) are below count.
template <int N>
bool exponentiate_vectors(const float* scores, bf16* weights, int count, float scale, float top, float slack, Lanes& sums) {
  const __m512 factor = _mm512_set1_ps(scale), offset = _mm512_set1_ps(top), unseen = _mm512_set1_ps(NO_TOP);
  __m512 x[N], most = unseen;
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    x[i] = _mm512_fmsub_ps(_mm512_load_ps(scores + 16 * i), factor, offset);
    if (count < 16 * N && i >= N - 2) x[i] = _mm512_mask_mov_ps(unseen, (1 << std::clamp(count - 16 * i, 0, 16)) - 1, x[i]);
    most = _mm512_max_ps(most, x[i]);
  }
  if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(slack), _CMP_GT_OQ)) return false;
  __m512 sum = __m512(sums);
#pragma GCC unroll 2
  for (int i = 0; i < N; i += 2) {
    const __m512 a = exp2_16(x[i]), b = exp2_16(x[i + 1]);
    sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
    store_32(weights + 16 * i, a, b);
  }
  sums = Lanes(sum);
  return true;
}

inline bool exponentiate(const float* scores, bf16* weights, int count, int width, float scale, float top, float slack,
                         Lanes& sums) {
  static_assert(SPAN == 64);
  if (count > 32) return exponentiate_vectors<4>(scores, weights, count, scale, top, slack, sums);
  if (width > 32) std::memset(static_cast<void*>(weights + 32), 0, 32 * sizeof(bf16));
  return exponentiate_vectors<2>(scores, weights, count, scale, top, slack, sums);
}
#endif

// scores[j] = tanh(scores[j] scale), relative error about 5e-7; near 0 by a series, where 1 - e would lose digits.
inline void cap_scores(float* scores, int count, float scale) {
#pragma omp simd
  for (int j = 0; j < count; j++) {
    const float x = scores[j] * scale, s = x * x, e = exp2_negative(-2 * LOG2E * std::fabs(x));
    const float series = 1 + s * (-3.33333333e-1f + s * (1.33333333e-1f + s * (-5.3968254e-2f + s * 2.1869489e-2f)));
    scores[j] = s < 0.0625f ? x * series : std::copysign((1 - e) / (1 + e), x);
  }
}

constexpr float HIDDEN = -3e38f;  // the score of a token that a row does not see

// Attention of up to ROWS rows to KV tokens, added to the workspace's state. Row r sees the first `visible + r / group`
// tokens if `causal`, else the first `visible`; with a window, only those from its `lowest` on. KV that `is_cold`, in no
// cache, is prefetched.
template <typename T>
struct Attend {
  int num_kv_heads, group, dim, block_size;
  float scale;      // factor of scores in the exponent of 2: scale * log2(e), with a cap softcap * log2(e)
  float cap_scale;  // factor of scores in tanh: scale / softcap; 0: no cap
  bool has_window;
  Units units;

  int64_t sub_block(const int32_t* table, int head, int token) const {
    const int64_t block = table[token / block_size];
    return (block * num_kv_heads + head) * block_size * dim + int64_t(token % block_size) / SUB * SUB * dim;
  }

  // Prefetches a sub-block of keys or values; from its end, which takes less time on Zen 4.
  void fetch(const T* sub_block) const {
    constexpr int line = 64 / sizeof(T);
    for (int i = SUB * dim - line; i >= 0; i -= line) __builtin_prefetch(sub_block + i, 0, 2);
  }

  void run(Workspace<T>& w, int num_rows, const T* keys, const T* values, const int32_t* table, int head, int visible,
           bool causal, bool is_cold) const {
    const int num_tokens = visible + (causal ? (num_rows - 1) / group : 0);
    const T* parts[CHUNK / SUB];
    int begin = 0;  // with a window, sub-blocks that no row sees are skipped
    if (has_window) begin = std::max(0, *std::min_element(w.lowest, w.lowest + num_rows)) / SUB * SUB;
    for (int first = begin; first < num_tokens; first += CHUNK) {
      const int count = std::min(CHUNK, num_tokens - first);
      const int num_subs = int(divide_up(count, SUB));
      for (int s = 0; is_cold && s < num_subs; s++) fetch(keys + sub_block(table, head, first + s * SUB));
      for (int at = 0; at < count; at += SPAN) {
        for (int s = at / SUB; s < std::min(num_subs, (at + SPAN) / SUB); s++) {
          const int64_t from = sub_block(table, head, first + s * SUB);
          parts[s] = values + from;
          if (is_cold) fetch(parts[s]);
          score(w.q, keys + from, w.scores + s * SUB - at, num_rows, count - s * SUB);
        }
        for (int r = 0; r < num_rows; r++) {
          const int seen = visible + (causal ? r / group : 0) - first;
          scores_to_weights(w, r, at, std::clamp(seen - at, 0, std::min(SPAN, count - at)), num_subs * SUB - at,
                            has_window ? w.lowest[r] - first - at : 0);
        }
      }
      for (int r = 0; r < num_rows; r++) w.sum[r] += sum_lanes(w.sums[r]), w.sums[r] = Lanes{};
      for (int s = 0; is_cold && head + 1 < num_kv_heads && s < num_subs; s++)  // while values are multiplied
        fetch(keys + sub_block(table, head + 1, first + s * SUB));
      if constexpr (std::is_same_v<T, bf16>) {
#ifdef HAS_AMX
        if (units == Units::tiles) {
          weigh_tiles(w.weights, parts, num_subs, w.out, num_rows > 16, dim);
          continue;
        }
#endif
#ifdef HAS_AVX512
        if (units == Units::vectors) {
          weigh_vectors(w.weights, parts, count, w.out, num_rows, dim);
          continue;
        }
#endif
      }
      weigh_plain(w.weights, parts, num_subs, w.out, num_rows, dim);
    }
  }

  void score(const T* q, const T* keys, float* scores, int num_rows, int count) const {
    if constexpr (std::is_same_v<T, bf16>) {
#ifdef HAS_AMX
      if (units == Units::tiles) return score_tiles(q, keys, scores, num_rows > 16, dim);
#endif
#ifdef HAS_AVX512
      if (units == Units::vectors) return score_vectors(q, keys, scores, num_rows, count, dim);
#endif
    }
    score_plain(q, keys, scores, num_rows, dim);
  }

  // Turns a row's scores of tokens [at, at + SPAN) of a chunk into weights. The row sees `seen` of them, without those
  // before `lowest`; weights of tokens up to `width` are set.
  void scores_to_weights(Workspace<T>& w, int row, int at, int seen, int width, int lowest) const {
    float* scores = w.scores + row * SPAN;
    T* weights = w.weights + row * CHUNK + at;
    width = std::min(SPAN, width);
    if (cap_scale) cap_scores(scores, seen, cap_scale);
    for (int j = 0; j < std::min(seen, lowest); j++) scores[j] = HIDDEN;
    if (exponentiate(scores, weights, seen, width, scale, w.top[row], SLACK, w.sums[row])) return;
    raise_top(w, row, largest(scores, seen) * scale, at);
    exponentiate(scores, weights, seen, width, scale, w.top[row], INFINITY, w.sums[row]);  // any weight: NaN might fail again
  }

  // Raises a row's running maximum. Its sum, its output and its weights of a chunk's first `count` tokens are rescaled.
  __attribute__((noinline)) void raise_top(Workspace<T>& w, int row, float top, int count) const {
    const float before = w.top[row], factor = exp2_negative(before - top);
    w.top[row] = top;
    if (before == NO_TOP) return;
    w.sum[row] *= factor, w.sums[row] *= factor;
    for (int j = row * CHUNK; j < row * CHUNK + count; j++) store(w.weights[j], load(w.weights[j]) * factor);
    for (int d = row * dim; d < (row + 1) * dim; d++) w.out[d] *= factor;
  }
};

// The number of rows that products compute if `used` rows are needed.
inline int padded_rows(int used, Units units) {
  if (units == Units::tiles) return used > 16 ? 32 : 16;
  return int(round_up(used, 4));
}

// Copies the query rows (token-major, then query head) of tokens [first, first + count) for one KV head; unused rows are 0.
template <typename T>
void pack_queries(Workspace<T>& w, const T* query, int64_t stride, int64_t first, int count, int head, int group,
                  int dim, Units units) {
  for (int t = 0; t < count; t++)
    std::memcpy(static_cast<void*>(w.q + t * group * dim), query + (first + t) * stride + head * group * dim,
                size_t(group) * dim * sizeof(T));
  const int used = count * group, padded = padded_rows(used, units);
  std::memset(static_cast<void*>(w.q + used * dim), 0, size_t(padded - used) * dim * sizeof(T));
  for (int r = used; r < padded; r++)
    std::memset(static_cast<void*>(w.weights + r * CHUNK), 0, CHUNK * sizeof(T));
}

template <typename T>
void start_rows(Workspace<T>& w, int num_rows, int dim, Units units) {
  for (int r = 0; r < ROWS; r++) w.top[r] = NO_TOP, w.sum[r] = 0, w.sums[r] = Lanes{};
  std::memset(w.out, 0, size_t(padded_rows(num_rows, units)) * dim * sizeof(float));
}

// Attention of a whole token batch; work_items.h describes the items.
template <typename T>
void attend(const T* query, int64_t query_stride, T* out, const T* keys, const T* values, const AttentionShape& shape,
            const Scoring& rule, const AttentionWork& work) {
  const int num_q_heads = shape.num_q_heads, num_kv_heads = shape.num_kv_heads, dim = shape.dim, group = shape.group();
  const float scale = rule.scale;
  const RowStates states{work.state, num_q_heads, group, dim};
  const Units units = std::is_same_v<T, bf16> && dim % 32 == 0 ? units_here() : Units::plain;
  const Attend<T> part{num_kv_heads, group, dim, shape.block_size, (rule.softcap ? rule.softcap : scale) * LOG2E,
                       rule.softcap ? scale / rule.softcap : 0, rule.window > 0, units};
#pragma omp parallel
  {
    Workspace<T>& w = workspace<Workspace<T>>();
#ifdef HAS_AMX
    if (units == Units::tiles) load_tile_config();
#endif
#pragma omp for schedule(dynamic, heads_at_once(work.num_shared, num_kv_heads))
    for (int64_t i = 0; i < work.num_shared * num_kv_heads; i++) {
      const int64_t* item = work.shared + i / num_kv_heads * SHARED_COLUMNS;
      const int head = int(i % num_kv_heads), count = int(item[SHARED_COUNT]), rows = count * group;
      pack_queries(w, query, query_stride, item[SHARED_ROW], count, head, group, dim, units);
      start_rows(w, rows, dim, units);
      for (int r = 0; part.has_window && r < rows; r++)
        w.lowest[r] = int(item[SHARED_LENGTH]) + work.own_seen[item[SHARED_ROW] + r / group] - rule.window;
      part.run(w, rows, keys, values, work.prefix_blocks + item[SHARED_TABLE], head, int(item[SHARED_LENGTH]), false,
               true);
      for (int r = 0; r < rows; r++) states.keep(w, r, item[SHARED_ROW], head);
    }
#pragma omp for schedule(dynamic, heads_at_once(work.num_own, num_kv_heads))
    for (int64_t i = 0; i < work.num_own * num_kv_heads; i++) {
      const int64_t* item = work.own + i / num_kv_heads * OWN_COLUMNS;
      const int head = int(i % num_kv_heads), count = int(item[OWN_COUNT]), rows = count * group;
      pack_queries(w, query, query_stride, item[OWN_ROW], count, head, group, dim, units);
      start_rows(w, rows, dim, units);
      for (int r = 0; item[OWN_NUM_SHARED] && r < rows; r++) states.take(w, r, item[OWN_ROW], head);
      const int prefix = int(item[OWN_PREFIX_LENGTH]), visible = int(item[OWN_VISIBLE]);
      for (int r = 0; part.has_window && r < rows; r++) w.lowest[r] = prefix + visible + r / group - rule.window;
      if (prefix && !item[OWN_NUM_SHARED])  // else a shared item has done it
        part.run(w, rows, keys, values, work.prefix_blocks + item[OWN_PREFIX_TABLE], head, prefix, false, count == 1);
      for (int r = 0; part.has_window && r < rows; r++) w.lowest[r] -= prefix;
      part.run(w, rows, keys, values, work.own_blocks + item[OWN_TABLE], head, visible, true, count == 1);
      for (int r = 0; r < rows; r++) {
        if (rule.sinks) w.sum[r] += std::exp2(rule.sinks[head * group + r % group] * LOG2E - w.top[r]);
        T* to = out + ((item[OWN_ROW] + r / group) * num_q_heads + head * group + r % group) * dim;
        const float* from = w.out + r * dim;
        const float share = 1.0f / w.sum[r];
        for (int d = 0; d < dim; d++) store(to[d], from[d] * share);
      }
    }
#ifdef HAS_AMX
    if (units == Units::tiles) _tile_release();
#endif
  }
}

}  // namespace
