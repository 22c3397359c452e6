// A λ-gate on the CPU: x·G(λx), and its derivatives, in one pass over memory each. LGELU_GATE names G, a struct of
// formulas.h: each gate is a library of its own, built when it is first used.
//
// Plain C++17 and OpenMP, without torch's headers, so that it builds in two seconds and serves any version of
// torch. `library.py` describes the functions at the end of this file to Python.
//
// Sums do not depend on the number of threads: work is cut into units by the sizes alone, a unit is added up
// by one thread, and units are added up in their order, in double precision.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "formulas.h"
#include "loops.h"

namespace {

using Gate = LGELU_GATE;

// ---------------------------------------------------------------------------------------------------------
// Runs: the inner loops. A stride of 1 reads memory as it lies; any other is gathered into a buffer first. λ is
// contiguous, so its stride is 1 where it varies along the run, and 0 where it does not.

template <class T>
struct Operand {
  T* start;
  int64_t stride;
};

template <class T>
inline const float* gathered(const Operand<const T>& from, int64_t n, float* buffer) {
  for (int64_t i = 0; i < n; ++i) buffer[i] = load(from.start[i * from.stride]);
  return buffer;
}

template <class In, class Out>
void forward_dense(const In* __restrict x, const float* __restrict hardness, bool one_hardness,
                   Out* __restrict y, int64_t n) {
  if (one_hardness) {
    const float scaled = Gate::kScale * *hardness;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(y[i], value<Gate>(load(x[i]), scaled));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(y[i], value<Gate>(load(x[i]), Gate::kScale * hardness[i]));
  }
}

template <class T>
void forward_run(Operand<const T> x, Operand<const float> hardness, Operand<T> y, int64_t n) {
  const float* lambda = hardness.start;
  const bool one = hardness.stride == 0;
  if (x.stride == 1 && y.stride == 1) return forward_dense(x.start, lambda, one, y.start, n);
  float buffer[kRun];
  T out[kRun];
  forward_dense(gathered(x, n, buffer), lambda, one, out, n);
  for (int64_t i = 0; i < n; ++i) y.start[i * y.stride] = out[i];
}

// Which of the two derivatives is written: ∂x to dx, δ·u²g(u)/Gate::kRate to the sums. One λ gives one sum, a λ per
// element adds to a sum per element.
enum Wanted { kInput = 1, kHardness = 2, kBoth = 3 };

template <int wanted, class In, class Out>
float backward_dense(const In* __restrict x, const In* __restrict delta, float hardness, Out* __restrict dx,
                     int64_t n) {
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

template <int wanted, class In, class Out>
void backward_dense_each(const In* __restrict x, const In* __restrict delta, const float* __restrict hardness,
                         Out* __restrict dx, float* __restrict sums, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const Slopes s = slopes<Gate>(load(x[i]), Gate::kScale * hardness[i]);
    const float d = load(delta[i]);
    if (wanted & kInput) store(dx[i], d * s.in_x);
    if (wanted & kHardness) sums[i] += d * s.in_hardness;
  }
}

template <class T>
struct BackwardOperands {
  Operand<const T> x, delta;
  Operand<const float> hardness;
  Operand<T> dx;
};

// Returns the sum where one λ serves the whole run; else adds to sums[0..n).
template <int wanted, class T>
float backward_run(const BackwardOperands<T>& run, float* sums, int64_t n) {
  const float* lambda = run.hardness.start;
  const bool one = run.hardness.stride == 0;
  const bool dense = run.x.stride == 1 && run.delta.stride == 1 && (!(wanted & kInput) || run.dx.stride == 1);
  if (dense) {
    if (one) return backward_dense<wanted>(run.x.start, run.delta.start, *lambda, run.dx.start, n);
    backward_dense_each<wanted>(run.x.start, run.delta.start, lambda, run.dx.start, sums, n);
    return 0.0f;
  }
  float x_buffer[kRun], delta_buffer[kRun];
  T out[kRun];
  const float* x = gathered(run.x, n, x_buffer);
  const float* delta = gathered(run.delta, n, delta_buffer);
  float sum = 0.0f;
  if (one) {
    sum = backward_dense<wanted>(x, delta, *lambda, out, n);
  } else {
    backward_dense_each<wanted>(x, delta, lambda, out, sums, n);
  }
  if (wanted & kInput) {
    for (int64_t i = 0; i < n; ++i) run.dx.start[i * run.dx.stride] = out[i];
  }
  return sum;
}

template <class T>
Operand<T> at(T* start, const Loops& loops, int operand, int64_t offset, int64_t position) {
  const int64_t stride = loops.strides[operand][loops.axes - 1];
  return {start + (start ? offset + position * stride : 0), stride};
}

// ---------------------------------------------------------------------------------------------------------
// The two passes. Backward cuts its sums up in one of three ways, by where λ varies

// Operands: x, λ, y.
template <class T>
void forward(const Loops& loops, const T* x, const float* hardness, T* y, int threads) {
  for_each_run(loops, Units(loops), threads, [&](int64_t, const int64_t* offset, int64_t start, int64_t n) {
    forward_run<T>(at(x, loops, 0, offset[0], start), at(hardness, loops, 1, offset[1], start),
                   at(y, loops, 2, offset[2], start), n);
  });
}

// Operands: x, δ, λ, dx.
template <class T>
BackwardOperands<T> operands(const Loops& loops, const T* x, const T* delta, const float* hardness, T* dx,
                             const int64_t* offset, int64_t start) {
  return {at(x, loops, 0, offset[0], start), at(delta, loops, 1, offset[1], start),
          at(hardness, loops, 2, offset[2], start), at(dx, loops, 3, offset[3], start)};
}

// One λ for all elements, or no ∂λ wanted: a sum per unit.
template <int wanted, class T>
void backward_flat(const Loops& loops, const T* x, const T* delta, const float* hardness, T* dx, double* dhardness,
                   int threads) {
  const Units units(loops);
  std::vector<double> sums(wanted & kHardness ? units.count : 0);
  for_each_run(loops, units, threads, [&](int64_t unit, const int64_t* offset, int64_t start, int64_t n) {
    float unused[kRun];
    const auto where = operands(loops, x, delta, hardness, dx, offset, start);
    const float sum = backward_run<wanted>(where, unused, n);
    if (wanted & kHardness) sums[unit] += sum;
  });
  if (wanted & kHardness) {
    *dhardness = 0.0;
    for (const double sum : sums) *dhardness += Gate::kRate * sum;
  }
}

// λ varies along an outer axis: a unit is one λ, with all rows that use it.
template <int wanted, class T>
void backward_outer(const Loops& loops, int64_t axis, const T* x, const T* delta, const float* hardness, T* dx,
                    double* dhardness, int threads) {
  Loops rest = loops;
  for (int64_t i = axis; i + 1 < loops.axes; ++i) {
    rest.sizes[i] = loops.sizes[i + 1];
    for (auto& strides : rest.strides) strides[i] = strides[i + 1];
  }
  rest.axes -= 1;
  const int64_t inner = rest.sizes[rest.axes - 1], rows = rows_of(rest);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < loops.sizes[axis]; ++unit) {
    Walk walk(rest, 0);
    for (int k = 0; k < kMaxOperands; ++k) walk.offset[k] += unit * loops.strides[k][axis];
    double sum = 0.0;
    float unused[kRun];
    for (int64_t row = 0; row < rows; ++row, walk.next()) {
      for (int64_t start = 0; start < inner; start += kRun) {
        const auto where = operands(rest, x, delta, hardness, dx, walk.offset, start);
        sum += backward_run<wanted>(where, unused, std::min(kRun, inner - start));
      }
    }
    dhardness[unit] = Gate::kRate * sum;
  }
}

// λ varies along the innermost axis: a unit is a stretch of it in a group of rows, with a sum per λ.
constexpr int64_t kStretch = 512;
constexpr int64_t kUnitsWanted = 32;      // to share among threads; fixed, so that sums are
constexpr int64_t kRowsPerFloatSum = 64;  // rows added in float32 before they go into double

template <int wanted, class T>
void backward_inner(const Loops& loops, const T* x, const T* delta, const float* hardness, T* dx, double* dhardness,
                    int threads) {
  const int64_t inner = loops.sizes[loops.axes - 1], rows = rows_of(loops);
  const int64_t stretches = ceil_div(inner, kStretch);
  const int64_t groups = std::min(rows, std::max<int64_t>(1, kUnitsWanted / stretches));
  std::vector<double> sums(groups * inner);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < groups * stretches; ++unit) {
    const int64_t group = unit / stretches, start = unit % stretches * kStretch;
    const int64_t n = std::min(kStretch, inner - start);
    const int64_t first = rows * group / groups, last = rows * (group + 1) / groups;
    double* totals = sums.data() + group * inner + start;
    Walk walk(loops, first);
    for (int64_t row = first; row < last;) {
      float partial[kStretch] = {};
      for (const int64_t stop = std::min(last, row + kRowsPerFloatSum); row < stop; ++row, walk.next()) {
        backward_run<wanted>(operands(loops, x, delta, hardness, dx, walk.offset, start), partial, n);
      }
      for (int64_t i = 0; i < n; ++i) totals[i] += partial[i];
    }
  }
  std::fill(dhardness, dhardness + inner, 0.0);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t i = 0; i < inner; ++i) dhardness[i] += Gate::kRate * sums[group * inner + i];
  }
}

// `axis` is the one along which λ varies, −1 for none. dx or dhardness may be null: not wanted.
template <class T>
void backward(const Loops& loops, int64_t axis, const T* x, const T* delta, const float* hardness, T* dx,
              double* dhardness, int threads) {
  if (!dhardness) return backward_flat<kInput>(loops, x, delta, hardness, dx, dhardness, threads);
  const bool inner = axis == loops.axes - 1;
  if (dx) {
    if (axis < 0) return backward_flat<kBoth>(loops, x, delta, hardness, dx, dhardness, threads);
    if (inner) return backward_inner<kBoth>(loops, x, delta, hardness, dx, dhardness, threads);
    return backward_outer<kBoth>(loops, axis, x, delta, hardness, dx, dhardness, threads);
  }
  if (axis < 0) return backward_flat<kHardness>(loops, x, delta, hardness, dx, dhardness, threads);
  if (inner) return backward_inner<kHardness>(loops, x, delta, hardness, dx, dhardness, threads);
  return backward_outer<kHardness>(loops, axis, x, delta, hardness, dx, dhardness, threads);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// What Python calls. dhardness receives Σ δ·u²g(u) per λ, in the order of the axis along which λ varies; the
// caller divides by λ².

extern "C" {

void lambda_gate_forward_float32(const Loops* loops, const float* x, const float* hardness, float* y, int threads) {
  forward(*loops, x, hardness, y, threads);
}

void lambda_gate_forward_bfloat16(const Loops* loops, const void* x, const float* hardness, void* y, int threads) {
  forward(*loops, static_cast<const bfloat16*>(x), hardness, static_cast<bfloat16*>(y), threads);
}

void lambda_gate_backward_float32(const Loops* loops, int64_t axis, const float* x, const float* delta,
                                  const float* hardness, float* dx, double* dhardness, int threads) {
  backward(*loops, axis, x, delta, hardness, dx, dhardness, threads);
}

void lambda_gate_backward_bfloat16(const Loops* loops, int64_t axis, const void* x, const void* delta,
                                   const float* hardness, void* dx, double* dhardness, int threads) {
  backward(*loops, axis, static_cast<const bfloat16*>(x), static_cast<const bfloat16*>(delta), hardness,
           static_cast<bfloat16*>(dx), dhardness, threads);
}

}  // extern "C"
