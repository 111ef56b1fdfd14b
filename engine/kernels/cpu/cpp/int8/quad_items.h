// A step's attention in int8: the items of work_items.h, shared ones first.
#pragma once

#include <vector>

#include "../work_items.h"
#include "quad_attention.h"
#include "spread.h"

namespace {

// Spreads the query rows (token-major, then query head) of `count` tokens for one KV head and converts them to bytes.
inline void pack_queries(QuadWorkspace& w, const bf16* query, int64_t stride, int64_t first, int count, int head,
                         const QuadAttend& a) {
  for (int r = 0; r < count * a.group; r++) {
    const bf16* from = query + (first + r / a.group) * stride + (head * a.group + r % a.group) * a.dim;
    alignas(64) float query_row[MAX_DIM];
    const float largest = spread_head(from, query_row, a.dim), inverse = inverse_scale(largest);
    Bits sums = {};  // of bytes, 128 too large each
    for (int d = 0; d < a.dim; d += 16) {
      const Bits bytes = to_bytes(load_lanes(query_row + d), inverse) & 255;
      sums += bytes;
      store_bytes(w.q + r * a.dim + d, bytes ^ 128);
    }
    w.factor[r] = std::max(byte_scale(largest) * a.scale, 1e-20f);  // not 0: times that, masked scores would count, too
    w.offset[r] = 128 * (128 * a.dim - int(sum_lanes(to_lanes(Ints(sums)))));
    w.top[r] = -1e30f, w.sum[r] = 0;
  }
  std::memset(w.out, 0, size_t(count * a.group) * a.dim * sizeof(float));
}

// The block tables of an own item.
inline QuadTables tables_of(const int64_t* item, const AttentionWork& work) {
  return {work.prefix_blocks + item[OWN_PREFIX_TABLE], work.own_blocks + item[OWN_TABLE], item[OWN_PREFIX_LENGTH]};
}

// Finds the own item of each row.
struct OwnItems {
  const int64_t* own;
  std::vector<int32_t> item_of_row;

  explicit OwnItems(const AttentionWork& work) : own(work.own) {
    for (int64_t i = 0; work.num_shared && i < work.num_own; i++) {
      const int64_t* item = own + i * OWN_COLUMNS;
      const size_t end = size_t(item[OWN_ROW] + item[OWN_COUNT]);
      if (item_of_row.size() < end) item_of_row.resize(end);
      std::fill_n(item_of_row.begin() + item[OWN_ROW], item[OWN_COUNT], int32_t(i));
    }
  }

  const int64_t* own_of(int64_t row) const { return own + item_of_row[size_t(row)] * OWN_COLUMNS; }

  // Whether the rows of an own item see no token after the prompt's first `end` tokens.
  static bool ends_by(const int64_t* item, int64_t end) {
    return item[OWN_PREFIX_LENGTH] + item[OWN_VISIBLE] + item[OWN_COUNT] - 1 <= end;
  }

  // Lists the members of a shared item; returns their number.
  int find_members(Member* members, const int64_t* item, const AttentionWork& work, int group) const {
    int num_members = 0;
    for (int64_t row = item[SHARED_ROW], end = row + item[SHARED_COUNT]; row < end;) {
      const int64_t* found = own_of(row);
      const int64_t count = std::min(end, found[OWN_ROW] + found[OWN_COUNT]) - row;
      Member& m = members[num_members++];
      m.tables = tables_of(found, work);
      m.first_row = int(row - item[SHARED_ROW]) * group, m.num_rows = int(count) * group;
      m.visible = found[OWN_PREFIX_LENGTH] + found[OWN_VISIBLE] + row - found[OWN_ROW], m.is_causal = true;
      row += count;
    }
    return num_members;
  }
};

// As in attention.h, but without caps, windows and sinks. A shared item covers whole chunks of the prefix, and for each of
// its rows also the next chunk, in which own tokens begin.
inline void attend(const bf16* query, int64_t query_stride, bf16* out, const int8_t* keys, const int8_t* values,
                   const AttentionShape& shape, const Scoring& rule, const AttentionWork& work) {
  const int num_q_heads = shape.num_q_heads, num_kv_heads = shape.num_kv_heads, dim = shape.dim, group = shape.group();
  const RowStates states{work.state, num_q_heads, group, dim};
  const QuadAttend part{num_kv_heads, group, dim, shape.block_size, rule.scale * LOG2E / float(spread_group(dim)),
                        dim % 64 == 0 && tiles_granted()};
  const OwnItems items(work);
  const auto write_row = [=](const QuadWorkspace& w, int r, int64_t row, int head) {
    bf16* to = out + (row * num_q_heads + head * group + r % group) * dim;
    const float share = 1.0f / w.sum[r];
    for (int d = 0; d < dim; d += 16) store_lanes(to + d, load_lanes(w.out + r * dim + d) * share);
  };
#pragma omp parallel
  {
    QuadWorkspace& w = workspace<QuadWorkspace>();
#ifdef HAS_AMX
    if (part.use_tiles) load_tile_config();
#endif
#pragma omp for schedule(dynamic, heads_at_once(work.num_shared, num_kv_heads))
    for (int64_t i = 0; i < work.num_shared * num_kv_heads; i++) {
      const int64_t* item = work.shared + i / num_kv_heads * SHARED_COLUMNS;
      const int head = int(i % num_kv_heads), count = int(item[SHARED_COUNT]);
      const int64_t first = item[SHARED_LENGTH], end = first + CHUNK;
      Member members[ROWS];
      const int num_members = items.find_members(members, item, work, group);
      pack_queries(w, query, query_stride, item[SHARED_ROW], count, head, part);
      Member all{members->tables, 0, count * group, first, false, {}, 0, 0};
      part.run(w, all, keys, values, head, 0, true);
      if (num_members == 1)
        part.run_chunk(w, *members, keys, values, head, first, true);
      else
        part.run_shared_chunk(w, members, num_members, keys, values, head, first,
                              int(std::min<int64_t>(members->tables.prefix_length - first, CHUNK)));
      for (int r = 0; r < count * group; r++) {
        const int64_t row = item[SHARED_ROW] + r / group;
        if (items.ends_by(items.own_of(row), end))
          write_row(w, r, row, head);
        else
          states.keep(w, r, item[SHARED_ROW], head);
      }
    }
#pragma omp for schedule(dynamic, heads_at_once(work.num_own, num_kv_heads))
    for (int64_t i = 0; i < work.num_own * num_kv_heads; i++) {
      const int64_t* item = work.own + i / num_kv_heads * OWN_COLUMNS;
      const int head = int(i % num_kv_heads), count = int(item[OWN_COUNT]), rows = count * group;
      Member all{tables_of(item, work), 0, rows, item[OWN_PREFIX_LENGTH] + item[OWN_VISIBLE], true, {}, 0, 0};
      if (OwnItems::ends_by(item, item[OWN_NUM_SHARED])) continue;  // a shared item has done it
      pack_queries(w, query, query_stride, item[OWN_ROW], count, head, part);
      for (int r = 0; item[OWN_NUM_SHARED] && r < rows; r++) states.take(w, r, item[OWN_ROW], head);
      part.run(w, all, keys, values, head, item[OWN_NUM_SHARED], count == 1);
      for (int r = 0; r < rows; r++) write_row(w, r, item[OWN_ROW] + r / group, head);
    }
#ifdef HAS_AMX
    if (part.use_tiles) _tile_release();
#endif
  }
}

}  // namespace
