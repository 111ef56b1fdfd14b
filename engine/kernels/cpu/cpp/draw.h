// Random draws of tokens from logits, after temperature, top-k and top-p. Only likely tokens are sorted, not whole rows.
#pragma once

#include <vector>

#include "number.h"

namespace {

constexpr int64_t DRAW_CHUNK = 1024;

struct DrawSettings {
  double temperature, top_k, top_p, uniform;
};

// weights[i] = exp((x[i] - max(x)) / temperature); returns their sum, and that of each chunk in chunk_sums.
inline double weigh(const float* x, double temperature, int64_t size, float* weights, double* chunk_sums) {
  float largest = x[0];
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < size; i++) largest = x[i] > largest ? x[i] : largest;
  const float scale = float(std::min(LOG2E / temperature, 1e30));
  double total = 0;
  for (int64_t first = 0; first < size; first += DRAW_CHUNK) {
    const int64_t last = std::min(first + DRAW_CHUNK, size);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; i++) sum += weights[i] = exp2_negative((x[i] - largest) * scale);
    total += chunk_sums[first / DRAW_CHUNK] = sum;
  }
  return total;
}

// The ids that top-k and top-p keep, ascending; lower ids first on ties. `total` becomes the sum of their weights.
inline void keep_likely(const float* x, const float* weights, const DrawSettings& settings, int64_t size, double& total,
                        std::vector<int32_t>& kept) {
  const auto is_before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  const int64_t top_k = int64_t(settings.top_k);
  kept.clear();
  if (top_k < size) {
    for (int64_t i = 0; i < size; i++) kept.push_back(int32_t(i));
    std::nth_element(kept.begin(), kept.begin() + top_k, kept.end(), is_before);
    kept.resize(top_k);
  } else {
    // The tokens up to this weight have less than 1 - top_p of the total weight, so top-p keeps none of them.
    const float least = float((1 - settings.top_p) * total / double(size));
    for (int64_t i = 0; i < size; i++)
      if (weights[i] > least) kept.push_back(int32_t(i));
  }
  std::sort(kept.begin(), kept.end(), is_before);
  if (top_k < size) {
    total = 0;
    for (const int32_t id : kept) total += weights[id];
  }
  double before = 0;
  size_t count = 0;
  while (count < kept.size() && (count == 0 || before < settings.top_p * total)) before += weights[kept[count++]];
  kept.resize(count);
  total = before;
  std::sort(kept.begin(), kept.end());
}

// The first id, ascending, at which the cumulative weight exceeds the uniform number times the total.
inline int64_t draw_row(const float* x, const DrawSettings& settings, int64_t size, float* weights, double* chunk_sums,
                        std::vector<int32_t>& kept) {
  double total = weigh(x, settings.temperature, size, weights, chunk_sums);
  double sum = 0;
  int64_t drawn = 0;  // the last id with a weight, if the sum is too small by rounding
  if (int64_t(settings.top_k) < size || settings.top_p < 1) {
    keep_likely(x, weights, settings, size, total, kept);
    for (const int32_t id : kept) {
      if (weights[id] > 0) drawn = id;
      if ((sum += weights[id]) > settings.uniform * total) break;
    }
    return drawn;
  }
  const double wanted = settings.uniform * total;
  int64_t first = 0;
  for (; first + DRAW_CHUNK < size && sum + chunk_sums[first / DRAW_CHUNK] <= wanted; first += DRAW_CHUNK)
    sum += chunk_sums[first / DRAW_CHUNK];
  for (int64_t id = first; id < size; id++) {
    if (weights[id] > 0) drawn = id;
    if ((sum += weights[id]) > wanted) break;
  }
  return drawn;
}

}  // namespace

// logits: [num_rows, size]; out: a token for each row.
extern "C" void draw_tokens(const float* logits, const DrawSettings* settings, int64_t* out, int64_t num_rows, int64_t size) {
#pragma omp parallel
  {
    std::vector<float> weights(size);
    std::vector<double> chunk_sums(size / DRAW_CHUNK + 1);
    std::vector<int32_t> kept;
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < num_rows; row++)
      out[row] = draw_row(logits + row * size, settings[row], size, weights.data(), chunk_sums.data(), kept);
  }
}
