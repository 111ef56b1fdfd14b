// Prefix-shared attention over paged KV in int8. What a row's answer is depends on the row and its own KV alone.
//
// Queries and keys are bytes, each with a scale for its head and token, so scores are sums of integers. A row meets its KV in
// chunks of CHUNK tokens, counted from the prompt's first token, prefix and own part alike: their weights, as numbers of 16
// bits relative to the chunk's largest, are multiplied with bytes of values in integers, too. Chunks are merged from left to
// right. Where the prefix ends, how many rows share it, and what computes the products thus change nothing.
//
// KV layout. A KV block holds, head by head, sub-blocks of 32 tokens:
//   keys   [2 halves of 16 tokens][D / 4][16 tokens][4]   (quads along the head dim), then bf16 scales [32]
//   values [8 quads of tokens][D][4]                      (quads along the tokens), then bf16 scales [32]
#pragma once

#include <memory>

#include "quads.h"
#include "work_items.h"

namespace {

constexpr int SUB = 32;         // tokens in a sub-block of KV
constexpr int ROWS = 32;        // query rows of a tile: tokens x query heads of one KV head
constexpr int CHUNK = 128;      // KV tokens whose weights have a scale in common
constexpr int MAX_DIM = 256;    // largest head dim
constexpr int MARGIN = 32;      // around a chunk, for vectors that begin before it or end after it
constexpr int MAX_PIECES = CHUNK / SUB + 2;
constexpr float WEIGHT_ONE = 65504.0f;  // the largest weight; a little above it still fits 16 bits

// Bytes of a sub-block: 32 tokens and their scales.
inline int64_t sub_block_bytes(int dim) { return int64_t(SUB) * (dim + int(sizeof(bf16))); }

// Tokens [first, first + count) of a sub-block, which are tokens [at, at + count) of a chunk.
struct Piece {
  const int8_t *keys, *values;
  int first, count, at;
};

struct alignas(64) QuadWorkspace {
  int8_t q[ROWS * MAX_DIM];
  float factor[ROWS];                             // of a row's scores, with log2(e) in it
  int32_t offset[ROWS];                           // -128 times the sum of a row of q
  int32_t sums[ROWS * SUB + 16];                  // of a piece that begins within its sub-block
  int32_t chunk_sums[ROWS * (CHUNK + MARGIN)];    // queries times keys of a chunk
  float scores[ROWS * CHUNK];                     // the same times the scales of keys, in units of `factor`
  float key_scales[CHUNK + MARGIN], value_scales[CHUNK + MARGIN];
  float largest_scale[CHUNK + MARGIN];            // of values up to each token
  uint8_t weights[2][MARGIN + ROWS * CHUNK + MARGIN];  // high and low bytes
  uint8_t piece_weights[MAX_PIECES][2][ROWS * SUB];
  int32_t products[2][ROWS * 16];
  float out[ROWS * MAX_DIM];
  float top[ROWS], sum[ROWS];
  Lanes exponentials[ROWS];                       // sums of a row's, lane by lane
  float chunk_top[ROWS], chunk_sum[ROWS], chunk_scale[ROWS];
  float rescale[ROWS], share[ROWS];               // factors of `out` and of a chunk's products
};

// Where a sequence's KV lies: its first `prefix_length` tokens in one block table, what follows in another.
struct QuadTables {
  const int32_t *prefix, *own;
  int64_t prefix_length;
};

struct QuadAttend {
  int num_kv_heads, group, dim, block_size;
  float scale;  // with log2(e) in it
  bool use_tiles;

  int64_t sub_block(const int32_t* table, int head, int64_t token) const {
    const int64_t block = table[token / block_size];
    return ((block * num_kv_heads + head) * block_size + token % block_size / SUB * SUB) * (dim + int64_t(sizeof(bf16)));
  }

  const bf16* scales(const int8_t* sub_block) const { return reinterpret_cast<const bf16*>(sub_block + SUB * dim); }

  // The pieces of tokens [first, end).
  int find_pieces(Piece* pieces, const int8_t* keys, const int8_t* values, const QuadTables& tables, int head,
                  int64_t first, int64_t end) const {
    int num_pieces = 0;
    for (int64_t token = first; token < end;) {
      const bool is_prefix = token < tables.prefix_length;
      const int64_t within = is_prefix ? token : token - tables.prefix_length;
      const int64_t left = (is_prefix ? std::min(end, tables.prefix_length) : end) - token;
      const int offset = int(within % SUB), count = int(std::min<int64_t>(SUB - offset, left));
      const int64_t at = sub_block(is_prefix ? tables.prefix : tables.own, head, within);
      pieces[num_pieces++] = {keys + at, values + at, offset, count, int(token - first)};
      token += count;
    }
    return num_pieces;
  }

  // Begins to fetch a sub-block of keys or values.
  void fetch(const int8_t* sub_block) const {
    for (int64_t i = 0; i < sub_block_bytes(dim); i += 64) __builtin_prefetch(sub_block + i, 0, 2);
  }

  // Row r sees the tokens of the chunks [first, end) that come before `visible + r / group` where `causal`, else all.
  __attribute__((noinline)) void run(QuadWorkspace& w, int num_rows, const int8_t* keys, const int8_t* values, const QuadTables& tables, int head,
           int64_t first, int64_t visible, bool causal, bool is_cold) const {
    const int64_t end = visible + (causal ? (num_rows - 1) / group : 0);
    Piece pieces[MAX_PIECES];
    for (; first < end; first += CHUNK) {
      const int num_pieces = find_pieces(pieces, keys, values, tables, head, first, std::min(end, first + CHUNK));
      const int count = pieces[num_pieces - 1].at + pieces[num_pieces - 1].count;
      for (int i = 0; is_cold && i < num_pieces; i++) fetch(pieces[i].keys), fetch(pieces[i].values);
      for (int i = 0; i < num_pieces; i++) score(w, pieces[i], num_rows);
      const auto seen_by = [&](int r) {
        return int(std::max<int64_t>(0, std::min<int64_t>(count, visible + (causal ? r / group : 0) - first)));
      };
      find_scales(w, pieces, num_pieces, seen_by(0), count);
      // Pass by pass, so that rows do not wait for each other's reductions.
      for (int r = 0; r < num_rows; r++) scale_row(w, r, seen_by(r));
      for (int r = 0; r < num_rows; r++) weigh_row(w, r, seen_by(r));
      for (int r = 0; r < num_rows; r++) w.chunk_sum[r] = sum_lanes(w.exponentials[r]);
      merge_sums(w);
      add_values(w, pieces, num_pieces, num_rows);
    }
  }

  // chunk_sums[r][at ...] = q[r] . keys of a piece. What is beyond the piece is overwritten, or not looked at.
  void score(QuadWorkspace& w, const Piece& piece, int num_rows) const {
    int32_t* const to = w.chunk_sums + piece.at;
    int32_t* const sums = piece.first ? w.sums : to;
    const int stride = piece.first ? SUB : CHUNK + MARGIN;
#ifdef HAS_AMX
    if (use_tiles)
      score_tiles(w.q, piece.keys, sums, stride, num_rows > 16);
    else
#endif
      score_vectors(w, piece.keys, sums, stride, num_rows);
    for (int r = 0; piece.first && r < num_rows; r++)
      for (int i = 0; i < piece.count; i += 16)
        store_ints(to + r * (CHUNK + MARGIN) + i, load_ints(sums + r * SUB + piece.first + i));
  }

  // 16 scales of a sub-block from token `first` on; those beyond its end are zero.
  static Lanes load_scales(const bf16* from, int first) {
    if (first + 16 <= SUB) return load_lanes(from);
    bf16 found[16] = {};
    std::memcpy(found, from, size_t(SUB - first) * sizeof(bf16));
    return load_lanes(found);
  }

#ifdef HAS_AMX
  // Tile registers: 0 to 3 sums, 4 queries, 5 keys.
  void score_tiles(const int8_t* q, const int8_t* keys, int32_t* sums, int stride, bool both) const {
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int d = 0; d < dim; d += 64) {
      _tile_loadd(4, q + d, dim);
      _tile_loadd(5, keys + d * 16, 64);
      _tile_dpbssd(0, 4, 5);
      if (both) {
        _tile_loadd(4, q + 16 * dim + d, dim);
        _tile_dpbssd(2, 4, 5);
      }
      _tile_loadd(5, keys + 16 * dim + d * 16, 64);
      if (both) {
        _tile_dpbssd(3, 4, 5);
        _tile_loadd(4, q + d, dim);
      }
      _tile_dpbssd(1, 4, 5);
    }
    _tile_stored(0, sums, stride * 4);
    _tile_stored(1, sums + 16, stride * 4);
    if (both) {
      _tile_stored(2, sums + 16 * stride, stride * 4);
      _tile_stored(3, sums + 16 * stride + 16, stride * 4);
    }
  }
#endif

  // Keys are made unsigned on the way, which w.offset takes back.
  void score_vectors(QuadWorkspace& w, const int8_t* keys, int32_t* to, int stride, int num_rows) const {
    const int size = dim;
    for (int half = 0; half < 2; half++) {
      by_quad_rows(num_rows, [=, &w](auto rows, int first) {
        QuadSums<rows, 1> sums;
        for (int r = 0; r < rows; r++) sums.sums[0][r] = Ints{} + w.offset[first + r];
        for (int d = 0; d < size; d += 4) {
          const Ints lanes = load_ints(keys + (half * size + d) * 16) ^ int32_t(0x80808080);
          sums.add(w.q + first * size + d, size, lanes);
        }
        sums.store(to + first * stride + half * 16, stride);
      });
    }
  }

  // Scales of keys and values, and the largest of values up to each token that is the last of some row.
  void find_scales(QuadWorkspace& w, const Piece* pieces, int num_pieces, int first_seen, int count) const {
    for (int i = 0; i < num_pieces; i++) {
      const Piece& piece = pieces[i];
      for (int j = 0; j < piece.count; j += 16) {
        const int first = piece.first + j;
        store_lanes(w.key_scales + piece.at + j, load_scales(scales(piece.keys) + first, first));
        store_lanes(w.value_scales + piece.at + j, load_scales(scales(piece.values) + first, first));
      }
    }
    store_lanes(w.value_scales + count, Lanes{});
    float most = 0;
    int token = 0;
    if (first_seen >= 16) {
      Lanes largest = load_lanes(w.value_scales);
      for (token = 16; token + 16 <= first_seen; token += 16) largest = larger(largest, load_lanes(w.value_scales + token));
      most = largest_lane(largest);
      w.largest_scale[token - 1] = most;
    }
    for (; token < count; token++)
      w.largest_scale[token] = most = w.value_scales[token] > most ? w.value_scales[token] : most;
  }

  // The scores of a row's first `seen` tokens of a chunk, up to a multiple of 16, and the largest of them.
  static void scale_row(QuadWorkspace& w, int row, int seen) {
    const int32_t* sums = w.chunk_sums + row * (CHUNK + MARGIN);
    float* scores = w.scores + row * CHUNK;
    Lanes most = Lanes{} - 1e30f;
    for (int j = 0; j < seen; j += 16) {
      Lanes found = to_lanes(load_ints(sums + j)) * load_lanes(w.key_scales + j);
      if (j + 16 > seen) {
        const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        found = lanes < seen - j ? found : Lanes{} - 1e30f;
      }
      most = larger(most, found);
      store_lanes(scores + j, found);
    }
    w.chunk_top[row] = seen ? largest_lane(most) * w.factor[row] : -1e30f;
  }

  // The weights of the same tokens, relative to the largest score; zeros from there on.
  static void weigh_row(QuadWorkspace& w, int row, int seen) {
    const float* scores = w.scores + row * CHUNK;
    uint8_t* high = w.weights[0] + MARGIN + row * CHUNK;
    uint8_t* low = w.weights[1] + MARGIN + row * CHUNK;
    const float largest_scale = seen ? w.largest_scale[seen - 1] : 0.0f;
    const Lanes factor = Lanes{} + w.factor[row], top = Lanes{} - w.chunk_top[row];
    const Lanes inverse = Lanes{} + (largest_scale > 0 ? WEIGHT_ONE / largest_scale : 0.0f);
    Lanes sums = {};
    int j = 0;
    for (; j < seen; j += 16) {
      const Lanes weight = exp2_lanes(fused(load_lanes(scores + j), factor, top));
      sums += weight;
      const Lanes scaled = load_lanes(w.value_scales + j) * inverse;
      const Bits rounded = Bits(fused(weight, scaled, Lanes{} + 8388608.0f));  // 2^23: low bits are whole
      store_bytes(high + j, rounded >> 8);
      store_bytes(low + j, rounded);
    }
    for (; j < CHUNK; j += 16) store_bytes(high + j, Bits{}), store_bytes(low + j, Bits{});
    w.exponentials[row] = sums, w.chunk_scale[row] = largest_scale / WEIGHT_ONE;
  }

  // Brings each row's maximum and sum to the new maximum. A row that sees nothing of the chunk stays as it is.
  static void merge_sums(QuadWorkspace& w) {
    for (int r = 0; r < ROWS; r += 16) {
      const Lanes old_top = load_lanes(w.top + r), chunk_top = load_lanes(w.chunk_top + r);
      const Lanes top = larger(old_top, chunk_top), sum = load_lanes(w.chunk_sum + r), one = Lanes{} + 1.0f;
      const Lanes before = old_top == top ? one : exp2_lanes(old_top - top);
      const Lanes now = sum == 0 ? Lanes{} : chunk_top == top ? one : exp2_lanes(chunk_top - top);
      store_lanes(w.top + r, top);
      store_lanes(w.sum + r, load_lanes(w.sum + r) * before + sum * now);
      store_lanes(w.rescale + r, before);
      store_lanes(w.share + r, load_lanes(w.chunk_scale + r) * now);
    }
  }

  // A piece's weights, from row to row `stride` apart, in the order of its sub-block.
  struct PieceWeights {
    const uint8_t *high, *low;
    int stride;
  };

  // Those of a whole sub-block lie so. Those of a part of one are copied, with zeros for the other tokens there.
  static PieceWeights place_weights(QuadWorkspace& w, const Piece& piece, uint8_t (&to)[2][ROWS * SUB], int num_rows) {
    const uint8_t *high = w.weights[0] + MARGIN + piece.at, *low = w.weights[1] + MARGIN + piece.at;
    if (piece.count == SUB) return {high, low, CHUNK};
    typedef uint8_t Tokens __attribute__((vector_size(SUB)));
    Tokens mask;
    for (int i = 0; i < SUB; i++) mask[i] = i >= piece.first && i < piece.first + piece.count ? 255 : 0;
    for (int part = 0; part < 2; part++) {
      for (int r = 0; r < num_rows; r++) {
        Tokens bytes;
        std::memcpy(&bytes, (part ? low : high) - piece.first + r * CHUNK, SUB);
        bytes &= mask;
        std::memcpy(to[part] + r * SUB, &bytes, SUB);
      }
    }
    return {to[0], to[1], SUB};
  }

  // out = out rescale + share weights . values of all pieces.
  void add_values(QuadWorkspace& w, const Piece* pieces, int num_pieces, int num_rows) const {
    PieceWeights weights[MAX_PIECES];
    for (int i = 0; i < num_pieces; i++) weights[i] = place_weights(w, pieces[i], w.piece_weights[i], num_rows);
    for (int d = 0; d < dim; d += 16) {
#ifdef HAS_AMX
      if (use_tiles)
        weigh_tiles(w, pieces, weights, num_pieces, num_rows > 16, d);
      else
#endif
        weigh_vectors(w, pieces, weights, num_pieces, num_rows, d);
      for (int r = 0; r < num_rows; r++) {
        float* out = w.out + r * dim + d;
        const Ints products = (load_ints(w.products[0] + r * 16) << 8) + load_ints(w.products[1] + r * 16);
        store_lanes(out, fused(to_lanes(products), Lanes{} + w.share[r], load_lanes(out) * w.rescale[r]));
      }
    }
  }

#ifdef HAS_AMX
  // Tile registers: 0 to 3 sums, 6 weights, 7 values, see QUAD_ATTENTION_TILES.
  void weigh_tiles(QuadWorkspace& w, const Piece* pieces, const PieceWeights* weights, int num_pieces, bool both,
                   int d) const {
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int i = 0; i < num_pieces; i++) {
      _tile_loadd(7, pieces[i].values + d * 4, dim * 4);
      const int64_t stride = weights[i].stride;
      _tile_loadd(6, weights[i].high, stride);
      _tile_dpbusd(0, 6, 7);
      _tile_loadd(6, weights[i].low, stride);
      _tile_dpbusd(1, 6, 7);
      if (both) {
        _tile_loadd(6, weights[i].high + 16 * stride, stride);
        _tile_dpbusd(2, 6, 7);
        _tile_loadd(6, weights[i].low + 16 * stride, stride);
        _tile_dpbusd(3, 6, 7);
      }
    }
    _tile_stored(0, w.products[0], 64);
    _tile_stored(1, w.products[1], 64);
    if (both) {
      _tile_stored(2, w.products[0] + 16 * 16, 64);
      _tile_stored(3, w.products[1] + 16 * 16, 64);
    }
  }
#endif

  void weigh_vectors(QuadWorkspace& w, const Piece* pieces, const PieceWeights* weights, int num_pieces, int num_rows,
                     int d) const {
    const int size = dim;
    for (int part = 0; part < 2; part++) {
      by_quad_rows(num_rows, [=, &w](auto rows, int first) {
        QuadSums<rows, 1> sums{};
        for (int i = 0; i < num_pieces; i++) {
          const int64_t stride = weights[i].stride;
          const uint8_t* from = (part ? weights[i].low : weights[i].high) + first * stride;
          const int end = pieces[i].first + pieces[i].count;
          for (int token = pieces[i].first / 4 * 4; token < end; token += 4)
            sums.add(from + token, stride, pieces[i].values + token * size + d * 4, 0);
        }
        sums.store(w.products[part] + first * 16, 16);
      });
    }
  }
};

#ifdef HAS_AMX
// Registers 6 and 7 hold 32 tokens: bytes of weights, and 8 quads of values.
inline void load_quad_attention_tiles() {
  static const TileConfig config = [] {
    TileConfig made;
    made.row_bytes[6] = SUB;
    made.rows[7] = SUB / 4;
    return made;
  }();
  _tile_loadconfig(&config);
}
#endif

inline QuadWorkspace& quad_workspace() {
  // Behind a pointer: the address of a thread's own memory would be asked for, by a call, wherever it is used.
  static thread_local const auto own = std::make_unique<QuadWorkspace>();
  return *own;
}

// Query rows (token-major, then query head) of `count` tokens for one KV head, as bytes.
inline void pack_queries(QuadWorkspace& w, const bf16* query, int64_t stride, int64_t first, int count, int head,
                         const QuadAttend& a) {
  for (int r = 0; r < count * a.group; r++) {
    const bf16* from = query + (first + r / a.group) * stride + (head * a.group + r % a.group) * a.dim;
    Lanes most = {};
    for (int d = 0; d < a.dim; d += 16) most = larger(most, magnitude(load_lanes(from + d)));
    const float largest = largest_lane(most), inverse = inverse_scale(largest);
    int32_t sum = 0;
    for (int d = 0; d < a.dim; d += 16) store_bytes(w.q + r * a.dim + d, to_bytes(load_lanes(from + d), inverse) ^ 128);
    for (int d = 0; !a.use_tiles && d < a.dim; d++) sum += w.q[r * a.dim + d];
    w.factor[r] = byte_scale(largest) * a.scale;
    w.offset[r] = -128 * sum;
    w.top[r] = -1e30f, w.sum[r] = 0;
  }
  std::memset(w.out, 0, size_t(count * a.group) * a.dim * sizeof(float));
}

// As attention.h's, see work_items.h, but without caps, windows and sinks; a group's `shared` part ends with a chunk.
inline void attend(const bf16* query, int64_t query_stride, bf16* out, const int8_t* keys, const int8_t* values,
                   int num_q_heads, int num_kv_heads, int dim, int block_size, float scale, const AttentionRule&,
                   const int64_t* shared, int64_t num_shared, const int64_t* own, int64_t num_own,
                   const int32_t* prefix_blocks, const int32_t* own_blocks, const int32_t*, float* state) {
  const int group = num_q_heads / num_kv_heads;
  const int state_size = dim + 2;
  const QuadAttend part{num_kv_heads, group, dim, block_size, scale * LOG2E, dim % 64 == 0 && tiles_granted()};
#pragma omp parallel
  {
    QuadWorkspace& w = quad_workspace();
#ifdef HAS_AMX
    if (part.use_tiles) load_quad_attention_tiles();
#endif
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_shared * num_kv_heads; i++) {
      const int64_t* item = shared + i / num_kv_heads * SHARED_COLUMNS;
      const int head = int(i % num_kv_heads), count = int(item[SHARED_COUNT]), rows = count * group;
      const QuadTables tables{prefix_blocks + item[SHARED_TABLE], nullptr, item[SHARED_LENGTH]};
      pack_queries(w, query, query_stride, item[SHARED_ROW], count, head, part);
      part.run(w, rows, keys, values, tables, head, 0, item[SHARED_LENGTH], false, true);
      for (int r = 0; r < rows; r++) {
        float* to = state + ((item[SHARED_ROW] + r / group) * num_q_heads + head * group + r % group) * state_size;
        to[0] = w.top[r], to[1] = w.sum[r];
        std::memcpy(to + 2, w.out + r * dim, dim * sizeof(float));
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_own * num_kv_heads; i++) {
      const int64_t* item = own + i / num_kv_heads * OWN_COLUMNS;
      const int head = int(i % num_kv_heads), count = int(item[OWN_COUNT]), rows = count * group;
      const QuadTables tables{prefix_blocks + item[OWN_PREFIX_TABLE], own_blocks + item[OWN_TABLE],
                              item[OWN_PREFIX_LENGTH]};
      pack_queries(w, query, query_stride, item[OWN_ROW], count, head, part);
      const int64_t first = (item[OWN_ROW] * num_q_heads + head * group) * state_size;
      for (int r = 0; item[OWN_NUM_SHARED] && r < rows; r++) {
        const float* from = state + first + (int64_t(r / group) * num_q_heads + r % group) * state_size;
        w.top[r] = from[0], w.sum[r] = from[1];
        std::memcpy(w.out + r * dim, from + 2, dim * sizeof(float));
      }
      part.run(w, rows, keys, values, tables, head, item[OWN_NUM_SHARED], item[OWN_PREFIX_LENGTH] + item[OWN_VISIBLE],
               true, count == 1);
      for (int r = 0; r < rows; r++) {
        bf16* to = out + ((item[OWN_ROW] + r / group) * num_q_heads + head * group + r % group) * dim;
        const float share = 1.0f / w.sum[r];
        for (int d = 0; d < dim; d += 16) store_lanes(to + d, load_lanes(w.out + r * dim + d) * share);
      }
    }
#ifdef HAS_AMX
    if (part.use_tiles) _tile_release();
#endif
  }
}

}  // namespace
