// Prefix-shared attention over paged KV in int8. A row's result depends only on the row and its KV.
//
// Queries and keys are spread (spread.h), then bytes with a scale per head and token, so scores are sums of integers. A row
// processes its KV in chunks of CHUNK tokens, counted from the prompt's first token, without regard to where the prefix ends.
// The weights of a chunk, 16-bit integers relative to the chunk's largest, are multiplied with bytes of values, in integers
// again. Chunks are merged from left to right. So the end of the prefix, the number of rows that share it, and the units that
// compute the products do not change the result.
//
// Short sequences that share a prefix also share the chunk in which it ends. In that chunk, products with the prefix's
// tokens are computed for all of them together, and products with own tokens for each; the sums of integers are the same.
//
// KV layout. A KV block has, for each head, sub-blocks of 32 tokens:
//   keys   [2 halves of 16 tokens][D / 4][16 tokens][4]   (quads along the head dim), then bf16 scales [32]
//   values [8 quads of tokens][D][4]                      (quads along the tokens), then bf16 scales [32]
#pragma once

#include "quads.h"

namespace {

constexpr int SUB = 32;         // tokens in a sub-block of KV
constexpr int ROWS = 32;        // query rows of a tile: tokens x query heads of one KV head
constexpr int CHUNK = 128;      // KV tokens whose weights share a scale
constexpr int MAX_DIM = 256;    // largest head dim
constexpr int MARGIN = 32;      // padding after a chunk, for vectors that extend beyond it
constexpr int STRIDE = CHUNK + MARGIN;  // from a row's scores to the next one's
constexpr int MAX_PIECES = CHUNK / SUB + 2;
constexpr float WEIGHT_ONE = 65504.0f;  // the integer of the largest weight; slightly larger ones still fit 16 bits

// Bytes of a sub-block: 32 tokens and their scales.
inline int64_t sub_block_bytes(int dim) { return int64_t(SUB) * (dim + int(sizeof(bf16))); }

// Tokens [first, first + count) of a sub-block, which are tokens [at, at + count) of a chunk.
struct Piece {
  const int8_t *keys, *values;
  int first, count, at;
};

struct alignas(64) QuadWorkspace {
  int8_t q[2 * ROWS * MAX_DIM];                   // twice the rows, here and below: tiles read beyond the last row
  float factor[ROWS];                             // of a row's scores, times log2(e)
  int32_t offset[2 * ROWS];                       // -128 times the sum of a row of q
  int32_t sums[ROWS * SUB + 16];                  // of a piece that does not start at its sub-block's first token
  float scores[2 * ROWS * STRIDE];                // of a chunk, in units of `factor`; first the integer sums, in place
  float key_scales[CHUNK + MARGIN], value_scales[CHUNK + MARGIN];
  float largest_scale[CHUNK + MARGIN];            // largest value scale up to each token
  uint8_t weights[2][2 * ROWS * CHUNK];           // high and low bytes
  const int8_t* quads[CHUNK / 4];                 // where the values [D][4] of each four tokens of a chunk are
  int8_t values[CHUNK * MAX_DIM];                 // [CHUNK / 4][D][4]: quads that are not in the KV; for tiles all of them
  int32_t products[2][2][ROWS * 16];              // of high and low bytes; two buffers, used alternately
  int32_t shared_sums[ROWS * MAX_DIM];            // of weights times values of tokens that all members see
  float out[ROWS * MAX_DIM];
  float top[ROWS], sum[ROWS];
  Lanes exponentials[ROWS];                       // sums of a row's weights, by lane
  float chunk_top[ROWS], chunk_sum[ROWS], chunk_scale[ROWS];
  float rescale[ROWS], share[ROWS];               // factors of `out` and of a chunk's products
};

// A sequence's block tables: one for its first `prefix_length` tokens, one for the later ones.
struct QuadTables {
  const int32_t *prefix, *own;
  int64_t prefix_length;
};

// Consecutive rows of a tile with the same KV. Row r sees the tokens before `visible + r / group` if `is_causal`, else those
// before `visible`.
struct Member {
  QuadTables tables;
  int first_row, num_rows;
  int64_t visible;
  bool is_causal;
  Piece pieces[MAX_PIECES];  // of a chunk, without the tokens that all members see
  int num_pieces, count;     // count: tokens of the chunk
};

struct QuadAttend {
  int num_kv_heads, group, dim, block_size;
  float scale;  // times log2(e), over the factor by which spreading makes scores larger
  bool use_tiles;

  int64_t sub_block(const int32_t* table, int head, int64_t token) const {
    const int64_t block = table[token / block_size];
    return ((block * num_kv_heads + head) * block_size + token % block_size / SUB * SUB) * (dim + int64_t(sizeof(bf16)));
  }

  const bf16* scales(const int8_t* sub_block) const { return reinterpret_cast<const bf16*>(sub_block + SUB * dim); }

  // Lists the pieces of tokens [from, end) of the chunk that starts at token `first`; returns their number.
  int find_pieces(Piece* pieces, const int8_t* keys, const int8_t* values, const QuadTables& tables, int head,
                  int64_t first, int64_t from, int64_t end) const {
    int num_pieces = 0;
    for (int64_t token = from; token < end;) {
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

  // Prefetches a sub-block of keys or values; from its end, which takes less time on Zen 4.
  void fetch(const int8_t* sub_block) const {
    for (int64_t i = sub_block_bytes(dim) - 64; i >= 0; i -= 64) __builtin_prefetch(sub_block + i, 0, 2);
  }

  // The end of the tokens that any row of the member sees.
  int64_t end_of(const Member& m) const { return m.visible + (m.is_causal ? (m.num_rows - 1) / group : 0); }

  // Finds the pieces of a member's chunk that starts at token `first`, but for the chunk's first `num_shared` tokens.
  void place(Member& m, const int8_t* keys, const int8_t* values, int head, int64_t first, int num_shared) const {
    const int64_t end = std::min(end_of(m), first + CHUNK);
    m.num_pieces = find_pieces(m.pieces, keys, values, m.tables, head, first, first + num_shared, end);
    m.count = int(end - first);
  }

  // Prefetches the keys of a member's pieces, or those `num_heads` heads further on.
  void fetch_keys(const Member& m, int num_heads = 0) const {
    for (int i = 0; i < m.num_pieces; i++) fetch(m.pieces[i].keys + num_heads * (block_size / SUB * sub_block_bytes(dim)));
  }

  // Computes the chunks from token `first` to the end for a single member.
  void run(QuadWorkspace& w, Member& member, const int8_t* keys, const int8_t* values, int head, int64_t first,
           bool is_cold) const {
    for (; first < end_of(member); first += CHUNK) run_chunk(w, member, keys, values, head, first, is_cold);
  }

  // Computes a member's chunk. On tiles, one half of the rows follows the other: what a half needs stays in the first-level
  // cache. Vectors would take longer for two times 16 rows than for 32. What is cold is prefetched shortly before it is used:
  // values during the products with keys, the next head's keys during those with values.
  __attribute__((noinline)) void run_chunk(QuadWorkspace& w, Member& m, const int8_t* keys, const int8_t* values,
                                           int head, int64_t first, bool is_cold) const {
    place(m, keys, values, head, first, 0);
    if (is_cold) fetch_keys(m);
    const int step = use_tiles ? ROWS / 2 : ROWS;
    for (int row = 0; row < m.num_rows; row += step) {
      const int end = std::min(m.num_rows, row + step);
      const bool is_first = row == 0;
      for (int i = 0; i < m.num_pieces; i++) {
        if (is_cold && is_first) fetch(m.pieces[i].values);
        score(w, m.pieces[i], m.first_row + row, end - row, m.first_row + row);
      }
      if (is_first) load_scales(w, m, first);
      weigh_rows(w, m, first, row, end, m.first_row + row);
      merge_sums(w, m.first_row + row, m.first_row + end);
      for (int i = 0; is_first && i < m.num_pieces; i++) gather_values(w, m.pieces[i]);
      if (is_cold && is_first && head + 1 < num_kv_heads) fetch_keys(m, 1);
      add_values(w, m.first_row + row, end - row, 0, m.count, false);
    }
  }

  // Computes the chunk that starts at token `first` for several members. Its first `num_shared` tokens belong to their common
  // prefix.
  __attribute__((noinline)) void run_shared_chunk(QuadWorkspace& w, Member* members, int num_members,
                                                  const int8_t* keys, const int8_t* values, int head, int64_t first,
                                                  int num_shared) const {
    Piece shared[MAX_PIECES];
    const int num_shared_pieces =
        find_pieces(shared, keys, values, members->tables, head, first, first, first + num_shared);
    int num_rows = 0;
    for (Member* m = members; m < members + num_members; m++) {
      place(*m, keys, values, head, first, num_shared);
      fetch_keys(*m);
      num_rows += m->num_rows;
    }
    for (int i = 0; i < num_shared_pieces; i++) {
      score(w, shared[i], 0, num_rows, 0);
      load_piece_scales(w, shared[i]);
    }
    for (const Member* m = members; m < members + num_members; m++) {
      for (int i = 0; i < m->num_pieces; i++) {
        fetch(m->pieces[i].values);
        score(w, m->pieces[i], m->first_row, m->num_rows, 0);
      }
      load_scales(w, *m, first);
      weigh_rows(w, *m, first, 0, m->num_rows, 0);
    }
    merge_sums(w, 0, num_rows);
    const int unit = use_tiles ? 64 : 4, own = num_shared / unit * unit;  // products take whole units of tokens
    if (num_shared) {
      for (int i = 0; i < num_shared_pieces; i++) gather_values(w, shared[i]);
      const int end = (num_shared + unit - 1) / unit * unit;
      clear_values(w, num_shared, end);
      add_values(w, 0, num_rows, 0, end, true);
      clear_values(w, own, num_shared);
    }
    for (const Member* m = members; m < members + num_members; m++) {
      for (int i = 0; i < m->num_pieces; i++) gather_values(w, m->pieces[i]);
      add_values(w, m->first_row, m->num_rows, own, m->count, false, num_shared);
    }
  }

  // The number of tokens of the chunk that starts at token `first` that a member's row sees.
  int seen_by(const Member& m, int row, int64_t first) const {
    return int(std::clamp<int64_t>(m.visible + (m.is_causal ? row / group : 0) - first, 0, m.count));
  }

  // Loads the scales of a member's pieces. Those of shared tokens have been loaded.
  void load_scales(QuadWorkspace& w, const Member& m, int64_t first) const {
    for (int i = 0; i < m.num_pieces; i++) load_piece_scales(w, m.pieces[i]);
    find_largest_scales(w, seen_by(m, 0, first), m.count);
  }

  // Scores and weights of a member's rows [row, end). Scores of shared tokens have been computed; w.scores begins with row
  // `base` of the tile.
  __attribute__((noinline)) void weigh_rows(QuadWorkspace& w, const Member& m, int64_t first, int row, int end,
                                            int base) const {
    // In two passes over the rows, so that the reductions of different rows overlap.
    for (int r = row; r < end; r++) scale_row(w, m.first_row + r, seen_by(m, r, first), base);
    for (int r = row; r < end; r++) weigh_row(w, m.first_row + r, seen_by(m, r, first), m.count, base);
  }

  // Writes the sums of q[r] times keys of a piece to scores [r - base][at ...]. Values beyond the piece, and in later rows, are
  // overwritten later or never read.
  void score(QuadWorkspace& w, const Piece& piece, int first_row, int num_rows, int base) const {
    int32_t* const to = reinterpret_cast<int32_t*>(w.scores) + (first_row - base) * STRIDE + piece.at;
    int32_t* const sums = piece.first ? w.sums : to;
    const int stride = piece.first ? SUB : STRIDE;
#ifdef HAS_AMX
    if (use_tiles)
      score_tiles(w.q + first_row * dim, piece.keys, sums, stride, num_rows > 16);
    else
#endif
      score_vectors(w, piece.keys, sums, stride, first_row, num_rows);
    for (int r = 0; piece.first && r < num_rows; r++)
      for (int i = 0; i < piece.count; i += 16)
        store_ints(to + r * STRIDE + i, load_ints(sums + r * SUB + piece.first + i));
  }

  // 16 scales of a sub-block, starting at token `first`; zero beyond its end.
  static Lanes load_scales(const bf16* from, int first) {
    if (first + 16 <= SUB) return load_lanes(from);
    bf16 found[16] = {};
    std::memcpy(found, from, size_t(SUB - first) * sizeof(bf16));
    return load_lanes(found);
  }

#ifdef HAS_AMX
  // Tile registers: 0 to 3 sums, 4 and 5 queries, 6 and 7 keys.
  void score_tiles(const int8_t* q, const int8_t* keys, int32_t* sums, int stride, bool both) const {
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int d = 0; d < dim; d += 64) {
      _tile_loadd(4, q + d, dim);
      _tile_loadd(6, keys + d * 16, 64);
      _tile_loadd(7, keys + 16 * dim + d * 16, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      if (both) {
        _tile_loadd(5, q + 16 * dim + d, dim);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    }
    _tile_stored(0, sums, stride * 4);
    _tile_stored(1, sums + 16, stride * 4);
    if (both) {
      _tile_stored(2, sums + 16 * stride, stride * 4);
      _tile_stored(3, sums + 16 * stride + 16, stride * 4);
    }
  }
#endif

  // Keys are converted to unsigned by adding 128, which w.offset cancels.
  void score_vectors(QuadWorkspace& w, const int8_t* keys, int32_t* to, int stride, int first_row, int num_rows) const {
    const int size = dim;
    const int8_t* q = w.q + first_row * dim;
    const int32_t* offset = w.offset + first_row;
    for (int half = 0; half < 2; half += QUAD_HALVES) {
      by_rows<QUAD_ROWS>(num_rows, [=](auto rows, int first) {
        QuadSums<rows, QUAD_HALVES> sums;
        sums.fill_columns(offset + first);
        for (int d = 0; d < size; d += 4) sums.add(q + first * size + d, size, keys + (half * size + d) * 16, size * 16);
        sums.store(to + first * stride + half * 16, stride);
      });
    }
  }

  // Loads the scales of keys and values of a piece.
  void load_piece_scales(QuadWorkspace& w, const Piece& piece) const {
    for (int j = 0; j < piece.count; j += 16) {
      const int first = piece.first + j;
      store_lanes(w.key_scales + piece.at + j, load_scales(scales(piece.keys) + first, first));
      store_lanes(w.value_scales + piece.at + j, load_scales(scales(piece.values) + first, first));
    }
  }

  // Computes the largest value scale up to each token that is a row's last one. The first row sees `first_seen` tokens.
  static void find_largest_scales(QuadWorkspace& w, int first_seen, int count) {
    store_lanes(w.value_scales + count, Lanes{});
    store_lanes(w.value_scales + count + 16, Lanes{});
    float most = 0;
    int token = 0;
    if (first_seen == count || first_seen >= 16) {
      const int end = first_seen == count ? count : first_seen / 16 * 16;
      Lanes largest = load_lanes(w.value_scales);
      for (token = 16; token < end; token += 16) largest = larger(largest, load_lanes(w.value_scales + token));
      most = largest_lane(largest), token = end;
      w.largest_scale[token - 1] = most;
    }
    for (; token < count; token++)
      w.largest_scale[token] = most = w.value_scales[token] > most ? w.value_scales[token] : most;
  }

  // Converts the sums of a row's first `seen` tokens of a chunk to scores, padded to a multiple of 32, and finds the largest.
  static void scale_row(QuadWorkspace& w, int row, int seen, int base) {
    float* scores = w.scores + (row - base) * STRIDE;
    Lanes most = Lanes{} - 1e30f;
    int j = 0;
    for (; j < seen; j += 16) {
      Lanes found = to_lanes(load_ints(scores + j)) * load_lanes(w.key_scales + j);
      if (j + 16 > seen) {
        const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        found = lanes < seen - j ? found : Lanes{} - 1e30f;
      }
      most = larger(most, found);
      store_lanes(scores + j, found);
    }
    if (j % 32) store_lanes(scores + j, Lanes{} - 1e30f);
    w.chunk_top[row] = seen ? largest_lane(most) * w.factor[row] : -1e30f;
  }

  // The weights of the same tokens, relative to the largest score; zeros for the rest of `count` tokens, rounded up to a
  // multiple of 64.
  static void weigh_row(QuadWorkspace& w, int row, int seen, int count, int base) {
    const float* scores = w.scores + (row - base) * STRIDE;
    uint8_t *high = w.weights[0] + row * CHUNK, *low = w.weights[1] + row * CHUNK;
    const float largest_scale = seen ? w.largest_scale[seen - 1] : 0.0f;
    const Lanes factor = Lanes{} + w.factor[row], top = Lanes{} - w.chunk_top[row];
    const Lanes inverse = Lanes{} + (largest_scale > 0 ? WEIGHT_ONE / largest_scale : 0.0f);
    Lanes sums = {};
    int j = 0;
    for (; j < seen; j += 32) {
      Bits rounded[2];
      for (int half = 0; half < 2; half++) {
        const int at = j + 16 * half;
        const Lanes weight = by_registers(
            [](Floats score, Floats factor, Floats top) { return exp2_any(fused_floats(score, factor, top)); },
            load_lanes(scores + at), factor, top);
        sums += weight;
        const Lanes scaled = load_lanes(w.value_scales + at) * inverse;
        rounded[half] = Bits(fused(weight, scaled, Lanes{} + 8388608.0f));  // 2^23: low bits are whole
      }
      store_low_bytes(rounded, high + j, low + j);
    }
    for (; j < (count + 63) / 64 * 64; j += 32) std::memset(high + j, 0, 32), std::memset(low + j, 0, 32);
    w.exponentials[row] = sums, w.chunk_scale[row] = largest_scale / WEIGHT_ONE;
  }

  // Updates the maximum and sum of rows [row, end) by the chunk. Rows that see no token of the chunk do not change.
  static void merge_sums(QuadWorkspace& w, int row, int end) {
    for (int r = row; r < end; r++) w.chunk_sum[r] = sum_lanes(w.exponentials[r]);
    for (int r = row; r < end; r += 16) {
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

  // Finds the values of a piece, in quads along the chunk's tokens. Copies quads that the KV does not have like that, and for
  // tiles all of them. Tokens after the piece in its last quad are replaced later, or have weight 0.
  void gather_values(QuadWorkspace& w, const Piece& piece) const {
    const int shift = (piece.first - piece.at) & 3;  // offset of the sub-block's quads against the chunk's, in tokens
    for (int at = piece.at / 4 * 4; at < piece.at + piece.count; at += 4) {
      const int first = at - piece.at + piece.first - shift;  // the sub-block's quad; with a shift also the next one
      const int8_t *from = piece.values + first * dim, *next = from + 4 * dim, *before = w.quads[at / 4];
      const bool is_low = first >= 0, is_high = shift && first + 4 < SUB;
      const uint32_t kept = at < piece.at ? (1u << 8 * (piece.at - at)) - 1 : 0;  // bytes of the previous piece
      if (shift || kept) {
        replace_quad(w, at / 4, [=](int d) {
          const Bits low = is_low ? Bits(load_ints(from + d)) >> 8 * shift : Bits{};
          const Bits high = is_high ? Bits(load_ints(next + d)) << (32 - 8 * shift) : Bits{};
          return kept ? Ints((Bits(load_ints(before + d)) & kept) | ((low | high) & ~kept)) : Ints(low | high);
        });
      } else if (use_tiles) {
        replace_quad(w, at / 4, [=](int d) { return load_ints(from + d); });
      } else {
        w.quads[at / 4] = from;
      }
    }
  }

  // The values of a quad from byte d on become f(d), in the workspace.
  template <typename F>
  void replace_quad(QuadWorkspace& w, int quad, F f) const {
    const int size = 4 * dim;
    int8_t* to = w.values + quad * size;
    for (int d = 0; d < size; d += 64) store_ints(to + d, f(d));
    w.quads[quad] = to;
  }

  // Zeroes the values of tokens [first, end) of a chunk; end is a multiple of 4, or its quad's other values are not used.
  void clear_values(QuadWorkspace& w, int first, int end) const {
    if (first % 4 && first < end) {
      const int8_t* before = w.quads[first / 4];
      const int32_t kept = (1 << 8 * (first % 4)) - 1;
      replace_quad(w, first / 4, [=](int d) { return load_ints(before + d) & kept; });
    }
    for (int quad = (first + 3) / 4; quad * 4 < end; quad++) replace_quad(w, quad, [](int) { return Ints{}; });
  }

  // Weights times values of tokens [begin, end) of a chunk. Products of tokens that `are_shared` are kept in shared_sums;
  // others are added to the output, together with shared_sums if there are `num_shared` shared tokens: out = out rescale +
  // share products. The products of 16 columns are used while the next ones are computed.
  void add_values(QuadWorkspace& w, int first_row, int num_rows, int begin, int end, bool are_shared,
                  int num_shared = 0) const {
    const auto use = [&](int d) {
      if (are_shared) return keep_products(w, num_rows, d);
      add_products(w, first_row, num_rows, d, num_shared > 0);
    };
    for (int d = 0; d < dim; d += 16) {
      int32_t(&products)[2][ROWS * 16] = w.products[d / 16 % 2];
#ifdef HAS_AMX
      if (use_tiles) {
        weigh_tiles(w, first_row, num_rows > 16, begin, end, d);
        if (d) use(d - 16);
        _tile_stored(0, products[0], 64);
        _tile_stored(1, products[1], 64);
        if (num_rows > 16) {
          _tile_stored(2, products[0] + 16 * 16, 64);
          _tile_stored(3, products[1] + 16 * 16, 64);
        }
        continue;
      }
#endif
      weigh_vectors(w, products, first_row, num_rows, begin, end, d);
      if (d) use(d - 16);
    }
    use(dim - 16);
  }

  static Ints sums_of(const int32_t (&products)[2][ROWS * 16], int row) {
    return (load_ints(products[0] + row * 16) << 8) + load_ints(products[1] + row * 16);
  }

  void keep_products(QuadWorkspace& w, int num_rows, int d) const {
    for (int r = 0; r < num_rows; r++) store_ints(w.shared_sums + r * dim + d, sums_of(w.products[d / 16 % 2], r));
  }

  void add_products(QuadWorkspace& w, int first_row, int num_rows, int d, bool has_shared) const {
    for (int i = 0; i < num_rows; i++) {
      const int r = first_row + i;
      float* out = w.out + r * dim + d;
      Ints sums = sums_of(w.products[d / 16 % 2], i);
      if (has_shared) sums += load_ints(w.shared_sums + r * dim + d);
      store_lanes(out, fused(to_lanes(sums), Lanes{} + w.share[r], load_lanes(out) * w.rescale[r]));
    }
  }

#ifdef HAS_AMX
  // Tile registers: 0 to 3 sums of high and low bytes, 4 and 5 weights, 6 values.
  void weigh_tiles(const QuadWorkspace& w, int first_row, bool both, int begin, int end, int d) const {
    const uint8_t *high = w.weights[0] + first_row * CHUNK, *low = w.weights[1] + first_row * CHUNK;
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int token = begin; token < end; token += 64) {
      _tile_loadd(6, w.values + token * dim + d * 4, dim * 4);
      _tile_loadd(4, high + token, CHUNK);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(5, low + token, CHUNK);
      _tile_dpbusd(1, 5, 6);
      if (both) {
        _tile_loadd(4, high + 16 * CHUNK + token, CHUNK);
        _tile_dpbusd(2, 4, 6);
        _tile_loadd(5, low + 16 * CHUNK + token, CHUNK);
        _tile_dpbusd(3, 5, 6);
      }
    }
  }
#endif

  void weigh_vectors(const QuadWorkspace& w, int32_t (&to)[2][ROWS * 16], int first_row, int num_rows, int begin, int end,
                     int d) const {
    for (int part = 0; part < 2; part += QUAD_HALVES) {
      by_rows<QUAD_ROWS>(num_rows, [=, &w, &to](auto rows, int first) {
        const int at = (first_row + first) * CHUNK;
        QuadSums<rows, 1> sums[QUAD_HALVES]{};
        for (int token = begin; token < end; token += 4)
          for (int i = 0; i < QUAD_HALVES; i++)
            sums[i].add(w.weights[part + i] + at + token, CHUNK, w.quads[token / 4] + d * 4, 0);
        for (int i = 0; i < QUAD_HALVES; i++) sums[i].store(to[part + i] + first * 16, 16);
      });
    }
  }
};

}  // namespace
