// Mixtures of experts: some experts compute each row. Rows are sorted by expert, and a product of all experts is one pass
// over blocks of up to 32 rows of one expert.
#pragma once

#include "branches.h"
#include "product.h"

namespace {

// Up to 32 sorted rows of one expert.
struct ExpertBlock {
  int64_t first_row;
  int32_t count, expert;
};

// The routing of the current layer. A slot is one of a row's experts: the chosen ones, then the shared ones.
struct Routing {
  std::vector<float> logits;       // [rows][router_columns]
  std::vector<float> weights;      // [rows][slots]
  std::vector<int32_t> experts;    // [rows][slots]
  std::vector<int64_t> places;     // [rows][slots]: index among the sorted rows
  std::vector<int32_t> expert_of;  // [sorted rows]
  std::vector<ExpertBlock> blocks;
};

inline Routing& current_routing() {
  static thread_local Routing routing;
  return routing;
}

// Stores the router's products in float32.
struct ToLogits {
  float* out;
  int64_t num_columns;

  bool needs(int64_t, int, int64_t) const { return true; }

  void operator()(const float* sums, int64_t row, int64_t panel) const {
    std::copy(sums, sums + PANEL, out + row * num_columns + panel * PANEL);
  }
};

// Chooses the experts of one row by the largest logits, and their weights: softmax over the chosen, or over all. logits:
// overwritten.
template <typename T>
void choose_experts(float* logits, const Branches<T>& b, int32_t* experts, float* weights) {
  if (b.router_bias)
    for (int i = 0; i < b.num_experts; i++) logits[i] += b.router_bias[i];
  const float largest = b.num_chosen ? *std::max_element(logits, logits + b.num_experts) : 0.0f;
  float sum = 0;
  for (int i = 0; i < b.num_chosen; i++) {
    experts[i] = int32_t(std::max_element(logits, logits + b.num_experts) - logits);
    sum += weights[i] = std::exp(logits[experts[i]] - largest);
    logits[experts[i]] = -INFINITY;
  }
  if (!b.is_renormalised)
    for (int i = 0; i < b.num_experts; i++) sum += std::exp(logits[i] - largest);
  for (int i = 0; i < b.num_chosen; i++) weights[i] /= sum;
  for (int i = 0; i < b.num_shared; i++) {
    experts[b.num_chosen + i] = b.num_experts + i;
    weights[b.num_chosen + i] = b.has_shared_gate ? 1.0f / (1.0f + std::exp(-logits[b.num_experts])) : 1.0f;
  }
}

// Chooses experts, and copies rows of x sorted by expert: sorted [num_rows * slots, size].
template <typename T>
void route_rows(const T* x, const Branches<T>& b, T* sorted, int64_t num_rows, int64_t size) {
  Routing& to = current_routing();
  const int64_t slots = b.num_slots(), num_sorted = num_rows * slots;
  to.logits.resize(num_rows * b.router_columns), to.weights.resize(num_sorted), to.experts.resize(num_sorted);
  to.places.resize(num_sorted), to.expert_of.resize(num_sorted), to.blocks.clear();
  if (b.router) {
    const typename PanelProduct<T>::Operands operands(x, b.router, size);
    multiply(operands, num_rows, b.router_columns, ToLogits{to.logits.data(), b.router_columns});
  }
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++)
    choose_experts(to.logits.data() + row * b.router_columns, b, to.experts.data() + row * slots,
                   to.weights.data() + row * slots);
  std::vector<int64_t> next(b.num_experts + b.num_shared + 1);
  for (const int32_t expert : to.experts) next[expert + 1]++;
  for (int64_t expert = 0, first = 0; expert + 1 < int64_t(next.size()); first = next[++expert]) {
    next[expert + 1] += first;
    std::fill(to.expert_of.begin() + first, to.expert_of.begin() + next[expert + 1], int32_t(expert));
    for (int64_t row = first; row < next[expert + 1]; row += 32)
      to.blocks.push_back({row, int32_t(std::min<int64_t>(32, next[expert + 1] - row)), int32_t(expert)});
  }
  for (int64_t i = 0; i < num_sorted; i++) to.places[i] = next[to.experts[i]]++;
#pragma omp parallel for
  for (int64_t i = 0; i < num_sorted; i++)
    std::memcpy(static_cast<void*>(sorted + to.places[i] * size), x + i / slots * size, size_t(size) * sizeof(T));
}

// Operands whose rows 32 b to 32 b + 31 are those of block b, multiplied with the panels of the block's expert.
template <typename T>
struct ExpertOperands {
  typedef typename PanelProduct<T>::Operands Operands;
  typedef float Sum;
  static constexpr bool has_shared_panels = false, has_tiles = Operands::has_tiles;
  const T *x, *panels;
  const ExpertBlock* blocks;
  int64_t num_columns, depth, row_bytes;
};

template <typename T>
RowBlock<typename PanelProduct<T>::Operands> find_block(const ExpertOperands<T>& all, int64_t first, int64_t) {
  const ExpertBlock& block = all.blocks[first / 32];
  return {{all.x, all.panels + block.expert * all.num_columns * all.depth, all.depth}, block.first_row, block.count};
}

template <typename Finish>
struct ExpertsToOutput {
  Finish output;
  const int32_t* expert_of;
  int64_t num_columns;

  bool needs(int64_t, int, int64_t) const { return true; }

  void operator()(const float* sums, int64_t row, int64_t panel) const {
    Finish to = output;
    if (to.bias) to.bias += expert_of[row] * num_columns;
    to(sums, row, panel);
  }
};

// A product in which each sorted row of x is multiplied with its expert's weights. 32 more rows of x may be read.
template <typename T, typename Finish>
void multiply_experts(const T* x, const PanelWeights<T>& weights, int64_t num_columns, int64_t depth, const Finish& finish) {
  const Routing& by = current_routing();
  multiply(ExpertOperands<T>{x, weights.panels, by.blocks.data(), num_columns, depth, depth * int64_t(sizeof(T))},
           32 * int64_t(by.blocks.size()), num_columns, finish, 32);
}

// out[row] = the sum over the row's slots of the slot's weight times its expert's result.
template <typename T>
void combine_experts(const T* sorted, T* out, int64_t num_rows, int64_t size, int64_t slots) {
  const Routing& by = current_routing();
#pragma omp parallel for
  for (int64_t row = 0; row < num_rows; row++) {
    const int64_t* places = by.places.data() + row * slots;
    const float* weights = by.weights.data() + row * slots;
    for (int64_t i = 0; i < size; i += 16) {
      Lanes sum = {};
      for (int64_t slot = 0; slot < slots; slot++) sum += load_lanes(sorted + places[slot] * size + i) * weights[slot];
      store_lanes(out + row * size + i, sum);
    }
  }
}

}  // namespace
