// A λ-gate on the CPU: x·G(λx), and its derivatives, in one pass over memory each. LGELU_GATE names G, a struct of
// formulas.h: each gate is a library of its own, built when it is first used.
//
// Plain C++17 and OpenMP, without torch's headers, so that it builds in two seconds and serves any version of
// torch. `function.py` describes the functions at the end of this file to Python.
//
// All operands fill their memory in one order, and all elements have one λ.
//
// Sums do not depend on the number of threads: work is cut into units by the sizes alone, a unit is added up
// by one thread, and units are added up in their order, in double precision.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "formulas.h"

namespace {

using Gate = LGELU_GATE;

// A run is what one call of the inner loop takes: short enough that its float32 sum is exact to 1e-6.
constexpr int64_t kRun = 2048;
constexpr int64_t kUnit = 16384;  // elements that one thread takes at a time

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------------------------------------------------
// The inner loops.

template <class T>
void forward_run(const T* __restrict x, float hardness, T* __restrict y, int64_t n) {
  const float scaled = Gate::kScale * hardness;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(y[i], value<Gate>(load(x[i]), scaled));
}

// Which of the two derivatives is made: ∂x in dx, δ·u²g(u)/Gate::kRate in the sum.
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

// dx may be null: not wanted.
template <class T>
T* at(T* start, int64_t offset) {
  return start ? start + offset : nullptr;
}

// ---------------------------------------------------------------------------------------------------------
// The two passes.

template <class T>
void forward(int64_t n, const T* x, float hardness, T* y, int threads) {
  const int64_t units = ceil_div(n, kUnit);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t start = unit * kUnit;
    forward_run(x + start, hardness, y + start, std::min(kUnit, n - start));
  }
}

template <int wanted, class T>
void backward_wanted(int64_t n, const T* x, const T* delta, float hardness, T* dx, double* dhardness, int threads) {
  const int64_t units = ceil_div(n, kUnit);
  std::vector<double> sums(units);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t end = std::min(n, (unit + 1) * kUnit);
    for (int64_t start = unit * kUnit; start < end; start += kRun) {
      sums[unit] += backward_run<wanted>(x + start, delta + start, hardness, at(dx, start), std::min(kRun, end - start));
    }
  }
  if (wanted & kHardness) {
    *dhardness = 0.0;
    for (const double sum : sums) *dhardness += Gate::kRate * sum;
  }
}

// dx or dhardness may be null: not wanted.
template <class T>
void backward(int64_t n, const T* x, const T* delta, float hardness, T* dx, double* dhardness, int threads) {
  const auto pass = !dhardness ? backward_wanted<kInput, T> : dx ? backward_wanted<kBoth, T> : backward_wanted<kHardness, T>;
  pass(n, x, delta, hardness, dx, dhardness, threads);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// What Python calls. dhardness receives Σ δ·u²g(u); the caller divides by λ².

extern "C" {

void lambda_gate_forward_float32(int64_t n, const float* x, float hardness, float* y, int threads) {
  forward(n, x, hardness, y, threads);
}

void lambda_gate_forward_bfloat16(int64_t n, const void* x, float hardness, void* y, int threads) {
  forward(n, static_cast<const bfloat16*>(x), hardness, static_cast<bfloat16*>(y), threads);
}

void lambda_gate_backward_float32(int64_t n, const float* x, const float* delta, float hardness, float* dx,
                                  double* dhardness, int threads) {
  backward(n, x, delta, hardness, dx, dhardness, threads);
}

void lambda_gate_backward_bfloat16(int64_t n, const void* x, const void* delta, float hardness, void* dx,
                                   double* dhardness, int threads) {
  backward(n, static_cast<const bfloat16*>(x), static_cast<const bfloat16*>(delta), hardness,
           static_cast<bfloat16*>(dx), dhardness, threads);
}

}  // extern "C"
