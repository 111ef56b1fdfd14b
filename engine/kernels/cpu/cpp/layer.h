// All decoder layers in one call. With a call per kernel, the caller's code and data would be evicted from the caches.
#pragma once

#include <cstdint>
#include <cstring>

#include "experts.h"
#include "number.h"
#include "work_items.h"

// A layer's settings and weights; engine/kernels/cpu/layer_structures.py has the same fields. Absent norms are null;
// `branches` is null for plain layers.
template <typename Format>
struct LayerWeights {
  AttentionShape shape;
  Scoring scoring;
  int64_t hidden_size, intermediate_size;
  float epsilon;
  int32_t rotation;  // index of the step's rotation
  int32_t table;     // index of the step with this layer's block table
  const Branches<typename Format::Row>* branches;
  const typename Format::Norm *attention_norm, *q_norm, *k_norm, *mlp_norm, *final_norm;
  typename Format::Weights qkv, output, gate_up, down;
};

// The arguments that all layers of a step share; engine/kernels/cpu/layer_structures.py has the same fields. The fields
// from `normed` on are scratch memory for rows rounded up to 32: hidden states, qkv, attended heads, [rows,
// intermediate_size]; int8 only: `bytes` [rows, largest padded depth] and their scales [rows]; branched layers only:
// `branch` [rows, hidden_size]; experts only: [(slots + 1) rows, hidden_size] and [(slots + 1) rows, intermediate_size].
template <typename Row>
struct LayerStep {
  AttentionWork work;
  const float *cos, *sin;  // of each rotation [num_rows, dim]
  Row *normed, *qkv, *attended, *gated;
  uint8_t* bytes;
  float* scales;
  Row *branch, *expert_rows, *expert_gated;
};

// The operations of a layer; engine/kernels/cpu/branched_layers.py has the same numbers. The caller passes their order.
enum class Operation : int32_t {
  attention_norm = 0, qkv = 1, rotate_and_write_kv = 2, attend = 3, select_rows = 4, output = 5, mlp_norm = 6, gate_up = 7,
  down = 8, attention_input = 9, norm_heads = 10, output_branch = 11, add_attention = 12, mlp_input = 13, activate = 14,
  down_branch = 15, add_mlp = 16, select_normed_rows = 17, route = 18, experts = 19
};

namespace {

template <typename Row>
void copy_rows(const Row* from, const int64_t* rows, Row* to, int64_t num_rows, int64_t size) {
  for (int64_t row = 0; row < num_rows; row++)
    std::memcpy(static_cast<void*>(to + row * size), from + rows[row] * size, size_t(size) * sizeof(Row));
}

// The inputs of the output product of the current layer: all rows, or copies of the output rows.
template <typename Row>
struct LayerRows {
  const Row *attended, *residual;
  int64_t num_rows;
};

// The operations of branched layers, which `engine.kernels.branched_layer` describes.
template <typename Format>
void run_branch(Operation operation, const LayerWeights<Format>& w, const LayerStep<typename Format::Row>& s,
                LayerRows<typename Format::Row>& rows, typename Format::Row* hidden, const int64_t* output_rows,
                int64_t num_output_rows) {
  const int64_t num_rows = s.work.num_rows, q_size = w.shape.q_size(), kv_size = w.shape.kv_size();
  const auto& b = *w.branches;
  switch (operation) {
    case Operation::attention_input:
      norm_rows(hidden, w.attention_norm, b.attention_norm_bias, s.normed, num_rows, w.hidden_size, w.epsilon, b);
      break;
    case Operation::norm_heads:
      norm_heads(s.qkv, b.apart_q_norm, num_rows, w.shape.qkv_size(), q_size, b.has_wide_norms ? q_size : w.shape.dim,
                 w.epsilon, b.norm_offset);
      norm_heads(s.qkv + q_size, b.apart_k_norm, num_rows, w.shape.qkv_size(), kv_size,
                 b.has_wide_norms ? kv_size : w.shape.dim, w.epsilon, b.norm_offset);
      break;
    case Operation::select_normed_rows:
      rows = {s.attended, hidden, num_rows};
      if (num_output_rows >= 0) {
        copy_rows(s.attended, output_rows, s.qkv, num_output_rows, q_size);
        copy_rows(s.normed, output_rows, s.branch, num_output_rows, w.hidden_size);
        std::memcpy(static_cast<void*>(s.normed), s.branch, size_t(num_output_rows * w.hidden_size) * sizeof(*hidden));
        copy_rows(hidden, output_rows, s.branch, num_output_rows, w.hidden_size);
        rows = {s.qkv, s.branch, num_output_rows};
      }
      break;
    case Operation::output_branch:
      Format::project_rows(s, rows.attended, w.output, nullptr, s.branch, rows.num_rows, w.hidden_size, q_size);
      break;
    case Operation::add_attention:
      add_branch(rows.residual, s.branch, b.post_attention_norm, hidden, rows.num_rows, w.hidden_size, w.epsilon,
                 b.norm_offset, b.multiplier);
      break;
    case Operation::mlp_input:
      norm_rows(hidden, w.mlp_norm, b.mlp_norm_bias, s.normed, rows.num_rows, w.hidden_size, w.epsilon, b);
      break;
    case Operation::activate:
      Format::project_normed(s, w.gate_up, s.gated, rows.num_rows, (1 + b.is_gated) * w.intermediate_size, w.hidden_size,
                             b.gating());
      break;
    case Operation::down_branch:
      Format::project_rows(s, s.gated, w.down, nullptr, s.branch, rows.num_rows, w.hidden_size, w.intermediate_size);
      break;
    case Operation::route:
      route_rows(s.normed, b, s.expert_rows, rows.num_rows, w.hidden_size);
      break;
    case Operation::experts:
      project_experts(s.expert_rows, w.gate_up, s.expert_gated, (1 + b.is_gated) * w.intermediate_size, w.hidden_size,
                      b.gating());
      project_experts(s.expert_gated, w.down, s.expert_rows, w.hidden_size, w.intermediate_size, Gating{});
      combine_experts(s.expert_rows, s.branch, rows.num_rows, w.hidden_size, b.num_slots());
      break;
    case Operation::add_mlp:
      add_branch(hidden, s.branch, b.post_mlp_norm, hidden, rows.num_rows, w.hidden_size, w.epsilon, b.norm_offset,
                 b.multiplier);
      break;
    default:
      break;
  }
}

// Runs an operation. hidden: [num_rows, hidden_size], in and out; unless num_output_rows is -1, only output_rows remain, as
// the first rows.
// Format: the types of rows, weights, norms and KV. `project_normed` reads the rows that `norm` has written, `project_rows`
// reads any rows.
template <typename Format>
void run(Operation operation, const LayerWeights<Format>& w, const LayerStep<typename Format::Row>& s,
         LayerRows<typename Format::Row>& rows, typename Format::Row* hidden, typename Format::KV* keys,
         typename Format::KV* values, const int64_t* output_rows, int64_t num_output_rows) {
  const int64_t num_rows = s.work.num_rows, q_size = w.shape.q_size(), qkv_size = w.shape.qkv_size();
  switch (operation) {
    case Operation::attention_norm:
      Format::norm(s, hidden, w.attention_norm, num_rows, w.hidden_size, w.epsilon);
      break;
    case Operation::qkv:
      Format::project_normed(s, w.qkv, s.qkv, num_rows, qkv_size, w.hidden_size, Gating{});
      break;
    case Operation::rotate_and_write_kv:
      rotate_and_store(s.qkv, s.cos + w.rotation * num_rows * w.shape.dim, s.sin + w.rotation * num_rows * w.shape.dim,
                       w.q_norm, w.k_norm, w.epsilon, keys, values, w.shape, s.work);
      break;
    case Operation::attend:
      attend(s.qkv, qkv_size, s.attended, keys, values, w.shape, w.scoring, s.work);
      break;
    case Operation::select_rows:
      rows = {s.attended, hidden, num_rows};
      if (num_output_rows >= 0) {  // qkv and normed are not needed any more
        copy_rows(s.attended, output_rows, s.qkv, num_output_rows, q_size);
        copy_rows(hidden, output_rows, s.normed, num_output_rows, w.hidden_size);
        rows = {s.qkv, s.normed, num_output_rows};
      }
      break;
    case Operation::output:
      Format::project_rows(s, rows.attended, w.output, rows.residual, hidden, rows.num_rows, w.hidden_size, q_size);
      break;
    case Operation::mlp_norm:
      Format::norm(s, hidden, w.mlp_norm, rows.num_rows, w.hidden_size, w.epsilon);
      break;
    case Operation::gate_up:
      Format::project_normed(s, w.gate_up, s.gated, rows.num_rows, 2 * w.intermediate_size, w.hidden_size,
                             swiglu_if(true));
      break;
    case Operation::down:
      Format::project_rows(s, s.gated, w.down, hidden, hidden, rows.num_rows, w.hidden_size, w.intermediate_size);
      break;
    default:
      if constexpr (Format::has_branches) run_branch(operation, w, s, rows, hidden, output_rows, num_output_rows);
  }
}

// Decoder layers, and the final norm if the last one has it. step: one for each block table. hidden: [num_rows, hidden_size].
// keys, values: one address per layer. output_rows: the num_output_rows rows that remain after the last layer; all do if that
// is -1.
template <typename Format>
void compute_layers(const LayerWeights<Format>* weights, int64_t num_layers, const Operation* operations,
                    int64_t num_operations, const LayerStep<typename Format::Row>* step, typename Format::Row* hidden,
                    typename Format::KV* const* keys, typename Format::KV* const* values, const int64_t* output_rows,
                    int64_t num_output_rows) {
  for (int64_t i = 0; i < num_layers; i++) {
    LayerRows<typename Format::Row> rows{};
    for (int64_t j = 0; j < num_operations; j++)
      run(operations[j], weights[i], step[weights[i].table], rows, hidden, keys[i], values[i],
          output_rows, i == num_layers - 1 ? num_output_rows : -1);
  }
  const LayerWeights<Format>& last = weights[num_layers - 1];
  if (last.final_norm)
    Format::norm_in_place(hidden, last.final_norm, num_output_rows >= 0 ? num_output_rows : step->work.num_rows,
                          last.hidden_size, last.epsilon);
}

}  // namespace

// The functions that Python calls, for a format and for its attention.
#define EXPORT_LAYERS(Format, suffix)                                                                                       \
  extern "C" void compute_layers_##suffix(const LayerWeights<Format>* weights, int64_t num_layers,                          \
                                          const Operation* operations, int64_t num_operations,                              \
                                          const LayerStep<Format::Row>* step, Format::Row* hidden, Format::KV* const* keys, \
                                          Format::KV* const* values, const int64_t* output_rows,                            \
                                          int64_t num_output_rows) {                                                        \
    compute_layers(weights, num_layers, operations, num_operations, step, hidden, keys, values, output_rows,                \
                   num_output_rows);                                                                                        \
  }

#define EXPORT_ATTENTION(Row, Norm, KV, suffix)                                                                             \
  extern "C" void attend_##suffix(const Row* query, int64_t query_stride, Row* out, const KV* keys, const KV* values,       \
                                  const AttentionShape* shape, const Scoring* scoring, const AttentionWork* work) {         \
    attend(query, query_stride, out, keys, values, *shape, *scoring, *work);                                                \
  }                                                                                                                         \
  extern "C" void rotate_and_store_##suffix(Row* qkv, const float* cos, const float* sin, const Norm* q_norm,               \
                                            const Norm* k_norm, float epsilon, KV* keys, KV* values,                        \
                                            const AttentionShape* shape, const AttentionWork* work) {                       \
    rotate_and_store(qkv, cos, sin, q_norm, k_norm, epsilon, keys, values, *shape, *work);                                  \
  }
