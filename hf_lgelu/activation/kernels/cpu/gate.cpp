// A λ-gate on the CPU: x·G(λx), and its derivatives, in one pass over memory each. LGELU_GATE names G, a struct of
// formulas.h: each gate is a library of its own, built when it is first used.
//
// Plain C++17 and OpenMP, without torch's headers, so that it builds in two seconds and serves any version of
// torch. `function.py` describes the functions at the end of this file to Python.
//
// All operands fill their memory in one order. In that order x is (outer, count, inner), and λ varies along `count`
// alone; one λ is (1, 1, n).
//
// Sums do not depend on the number of threads: work is cut into units by the sizes alone, a unit is added up
// by one thread, and units are added up in their order, in double precision.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "formulas.h"

namespace {

using Gate = LGELU_GATE;

struct Sizes {
  int64_t outer, count, inner;
};

// A run is what one call of the inner loop takes: short enough that its float32 sum is exact to 1e-6.
constexpr int64_t kRun = 2048;
constexpr int64_t kUnit = 16384;  // elements that one thread takes at a time

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------------------------------------------------
// The inner loops, with one λ or one for each element.

template <class T>
void forward_run(const T* __restrict x, float hardness, T* __restrict y, int64_t n) {
  const float scaled = Gate::kScale * hardness;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(y[i], value<Gate>(load(x[i]), scaled));
}

template <class T>
void forward_run_each(const T* __restrict x, const float* __restrict hardness, T* __restrict y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(y[i], value<Gate>(load(x[i]), Gate::kScale * hardness[i]));
}

// Which of the two derivatives is written: ∂x to dx, δ·u²g(u)/Gate::kRate to the sums. One λ gives one sum, a λ per
// element adds to a sum per element.
enum Wanted { kInput = 1, kHardness = 2, kBoth = 3 };

template <int wanted, class T>
float backward_run(const T* __restrict x, const T* __restrict delta, float hardness, T* __restrict dx, int64_t n) {
  const float scaled = Gate::kScale * hardness;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const Slopes s = slopes<Gate>(load(x[i]), scaled);
    const float d = load(delta[i]);
    if (wanted & kInput) store(dx[i], d * s.in_x);
    if (wanted & kHardness) sum += d * s.in_hardness;
  }
  return sum;
}

template <int wanted, class T>
void backward_run_each(const T* __restrict x, const T* __restrict delta, const float* __restrict hardness,
                       T* __restrict dx, float* __restrict sums, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const Slopes s = slopes<Gate>(load(x[i]), Gate::kScale * hardness[i]);
    const float d = load(delta[i]);
    if (wanted & kInput) store(dx[i], d * s.in_x);
    if (wanted & kHardness) sums[i] += d * s.in_hardness;
  }
}

// dx may be null: not wanted.
template <class T>
T* at(T* start, int64_t offset) {
  return start ? start + offset : nullptr;
}

// ---------------------------------------------------------------------------------------------------------
// The two passes, each in one of three ways, by where λ varies.

template <class T>
void forward(Sizes sizes, const T* x, const float* hardness, T* y, int threads) {
  const int64_t outer = sizes.outer, count = sizes.count, inner = sizes.inner;
  if (count > 1 && inner == 1) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < outer; ++row) forward_run_each(x + row * count, hardness, y + row * count, count);
    return;
  }
  const int64_t per_row = ceil_div(inner, kUnit);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < outer * count * per_row; ++unit) {
    const int64_t row = unit / per_row, start = unit % per_row * kUnit, offset = row * inner + start;
    forward_run(x + offset, hardness[row % count], y + offset, std::min(kUnit, inner - start));
  }
}

// One λ for all elements: a sum per unit.
template <int wanted, class T>
void backward_one(Sizes sizes, const T* x, const T* delta, const float* hardness, T* dx, double* dhardness,
                  int threads) {
  const int64_t n = sizes.inner, units = ceil_div(n, kUnit);
  std::vector<double> sums(units);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t end = std::min(n, (unit + 1) * kUnit);
    for (int64_t start = unit * kUnit; start < end; start += kRun) {
      sums[unit] += backward_run<wanted>(x + start, delta + start, *hardness, at(dx, start), std::min(kRun, end - start));
    }
  }
  if (wanted & kHardness) {
    *dhardness = 0.0;
    for (const double sum : sums) *dhardness += Gate::kRate * sum;
  }
}

// λ varies along an outer axis: a unit is one λ, with all rows that use it.
template <int wanted, class T>
void backward_outer(Sizes sizes, const T* x, const T* delta, const float* hardness, T* dx, double* dhardness,
                    int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < sizes.count; ++unit) {
    double sum = 0.0;
    for (int64_t row = 0; row < sizes.outer; ++row) {
      const int64_t first = (row * sizes.count + unit) * sizes.inner;
      for (int64_t start = first; start < first + sizes.inner; start += kRun) {
        const int64_t n = std::min(kRun, first + sizes.inner - start);
        sum += backward_run<wanted>(x + start, delta + start, hardness[unit], at(dx, start), n);
      }
    }
    if (wanted & kHardness) dhardness[unit] = Gate::kRate * sum;
  }
}

// λ varies along the innermost axis: a unit is a stretch of it in a group of rows, with a sum per λ.
constexpr int64_t kStretch = 512;
constexpr int64_t kUnitsWanted = 32;      // to share among threads; fixed, so that sums are
constexpr int64_t kRowsPerFloatSum = 64;  // rows added in float32 before they go into double

template <int wanted, class T>
void backward_inner(Sizes sizes, const T* x, const T* delta, const float* hardness, T* dx, double* dhardness,
                    int threads) {
  const int64_t count = sizes.count, rows = sizes.outer;
  const int64_t stretches = ceil_div(count, kStretch);
  const int64_t groups = std::min(rows, std::max<int64_t>(1, kUnitsWanted / stretches));
  std::vector<double> sums(groups * count);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < groups * stretches; ++unit) {
    const int64_t group = unit / stretches, start = unit % stretches * kStretch;
    const int64_t n = std::min(kStretch, count - start);
    const int64_t first = rows * group / groups, last = rows * (group + 1) / groups;
    double* totals = sums.data() + group * count + start;
    for (int64_t row = first; row < last;) {
      float partial[kStretch] = {};
      for (const int64_t stop = std::min(last, row + kRowsPerFloatSum); row < stop; ++row) {
        const int64_t offset = row * count + start;
        backward_run_each<wanted>(x + offset, delta + offset, hardness + start, at(dx, offset), partial, n);
      }
      for (int64_t i = 0; i < n; ++i) totals[i] += partial[i];
    }
  }
  if (wanted & kHardness) {
    std::fill(dhardness, dhardness + count, 0.0);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = 0; i < count; ++i) dhardness[i] += Gate::kRate * sums[group * count + i];
    }
  }
}

template <int wanted, class T>
void backward_wanted(Sizes sizes, const T* x, const T* delta, const float* hardness, T* dx, double* dhardness,
                     int threads) {
  const auto pass = sizes.count == 1  ? backward_one<wanted, T>
                    : sizes.inner > 1 ? backward_outer<wanted, T>
                                      : backward_inner<wanted, T>;
  pass(sizes, x, delta, hardness, dx, dhardness, threads);
}

// dx or dhardness may be null: not wanted.
template <class T>
void backward(Sizes sizes, const T* x, const T* delta, const float* hardness, T* dx, double* dhardness, int threads) {
  const auto pass = !dhardness ? backward_wanted<kInput, T> : dx ? backward_wanted<kBoth, T> : backward_wanted<kHardness, T>;
  pass(sizes, x, delta, hardness, dx, dhardness, threads);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// What Python calls. dhardness receives Σ δ·u²g(u) per λ; the caller divides by λ².

extern "C" {

void lambda_gate_forward_float32(int64_t outer, int64_t count, int64_t inner, const float* x, const float* hardness,
                                 float* y, int threads) {
  forward({outer, count, inner}, x, hardness, y, threads);
}

void lambda_gate_forward_bfloat16(int64_t outer, int64_t count, int64_t inner, const void* x, const float* hardness,
                                  void* y, int threads) {
  forward({outer, count, inner}, static_cast<const bfloat16*>(x), hardness, static_cast<bfloat16*>(y), threads);
}

void lambda_gate_backward_float32(int64_t outer, int64_t count, int64_t inner, const float* x, const float* delta,
                                  const float* hardness, float* dx, double* dhardness, int threads) {
  backward({outer, count, inner}, x, delta, hardness, dx, dhardness, threads);
}

void lambda_gate_backward_bfloat16(int64_t outer, int64_t count, int64_t inner, const void* x, const void* delta,
                                   const float* hardness, void* dx, double* dhardness, int threads) {
  backward({outer, count, inner}, static_cast<const bfloat16*>(x), static_cast<const bfloat16*>(delta), hardness,
           static_cast<bfloat16*>(dx), dhardness, threads);
}

}  // extern "C"
