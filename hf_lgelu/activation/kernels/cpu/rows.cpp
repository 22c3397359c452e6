// The maps around a ReLU at one token: of the units that are not zero, and of no others, the rows are read.
//
// y = bias + Σ gate·(up·x + up_bias)·down over the live units, where up and down are a unit's rows of the maps beside
// and behind the gate; without `up`, y = bias + Σ gate·down. With 0 outputs, no `gates` and no `down`, y = up·x + up_bias.
//
// The sum does not depend on the number of threads: live units are cut into parts by their number alone.

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace {

constexpr int kRows = 8;             // read at once: the rows lie apart, and memory answers each of them late
constexpr int kLine = 16;            // floats in a line of the cache
constexpr int kParts = 16;           // of the live units, each with a sum of its own
constexpr int64_t kAlone = 1 << 18;  // with fewer floats to read, waking other threads costs more than they save

using Rows = std::array<const float*, kRows>;

// Has the line of each row that holds float `k` fetched into the second cache.
inline void fetch(const Rows& rows, int64_t k) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) __builtin_prefetch(rows[r] + k, 0, 2);
}

// Row by row the product with x, while the rows that come next are fetched.
inline void products(const Rows& rows, const Rows& next, const float* __restrict x, int64_t n, float* out) {
  float sums[kRows][kLine] = {};
  const int64_t whole = n / kLine * kLine;
  for (int64_t k = 0; k < whole; k += kLine) {
    fetch(next, k);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma omp simd
      for (int i = 0; i < kLine; ++i) sums[r][i] += rows[r][k + i] * x[k + i];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    out[r] = 0.0f;
    for (int i = 0; i < kLine; ++i) out[r] += sums[r][i];
    for (int64_t k = whole; k < n; ++k) out[r] += rows[r][k] * x[k];
  }
}

// Adds the rows, each times its weight, to `sum`.
inline void add(const Rows& rows, const Rows& next, const float* weights, int64_t n, float* __restrict sum) {
  for (int64_t k = 0; k < n; k += kLine) {
    fetch(next, k);
    const int64_t end = std::min(n, k + kLine);
#pragma omp simd
    for (int64_t i = k; i < end; ++i) {
      float value = sum[i];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) value += weights[r] * rows[r][i];
      sum[i] = value;
    }
  }
}

}  // namespace

extern "C" void live_rows_float32(int64_t units, int64_t inputs, int64_t outputs, const float* x, const float* gates,
                                  const float* up, const float* up_bias, const float* down, const float* bias, float* y,
                                  int threads) {
  std::vector<int64_t> live;
  for (int64_t unit = 0; unit < units; ++unit)
    if (!gates || gates[unit] != 0.0f) live.push_back(unit);
  const int64_t count = live.size();
  std::vector<float> sums(kParts * outputs);
#pragma omp parallel for schedule(dynamic) num_threads(threads) \
    if (threads > 1 && count * (up ? inputs + outputs : outputs) > kAlone)
  for (int part = 0; part < kParts; ++part) {
    const int64_t end = count * (part + 1) / kParts;
    const auto rows_from = [&](const float* map, int64_t width, int64_t first) {
      Rows rows;  // past the end the last one again
      for (int r = 0; r < kRows; ++r) rows[r] = map + live[std::min(first + r, end - 1)] * width;
      return rows;
    };
    for (int64_t first = count * part / kParts; first < end; first += kRows) {
      const Rows here = rows_from(down ? down : up, down ? outputs : inputs, first);
      const Rows next = rows_from(up ? up : down, up ? inputs : outputs, first + kRows);
      float weights[kRows] = {};
      if (up) products(rows_from(up, inputs, first), down ? here : next, x, inputs, weights);
      for (int r = 0; r < kRows; ++r) {
        const int64_t unit = live[std::min(first + r, end - 1)];
        const float value = up ? weights[r] + (up_bias ? up_bias[unit] : 0.0f) : 1.0f;
        weights[r] = first + r < end && gates ? gates[unit] * value : 0.0f;
        if (!down && first + r < end) y[unit] = value;
      }
      if (down) add(here, next, weights, outputs, sums.data() + part * outputs);
    }
  }
  if (!down) return;
  for (int64_t i = 0; i < outputs; ++i) y[i] = bias ? bias[i] : 0.0f;
  for (int part = 0; part < kParts; ++part) {
    for (int64_t i = 0; i < outputs; ++i) y[i] += sums[part * outputs + i];
  }
}
