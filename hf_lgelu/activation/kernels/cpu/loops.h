// Nested loops over operands of any strides, cut into runs and units that threads share.

#pragma once

#include <algorithm>
#include <cstdint>

namespace {

// Nested loops, the innermost last. layout.py merges the axes; strides are in elements.
constexpr int kMaxAxes = 8;
constexpr int kMaxOperands = 4;
struct Loops {
  int64_t axes;
  int64_t sizes[kMaxAxes];
  int64_t strides[kMaxOperands][kMaxAxes];
};

// A run is what one call of the inner loop takes: short enough that its float32 sum is exact to 1e-6, and that
// gathered operands stay in the first-level cache.
constexpr int64_t kRun = 2048;
constexpr int64_t kUnit = 16384;  // elements that one thread takes at a time

// Counts through all loops but the last, and keeps every operand's offset.
class Walk {
 public:
  Walk(const Loops& loops, int64_t row) : loops_(loops) {
    for (int axis = static_cast<int>(loops.axes) - 2; axis >= 0; --axis) {
      index_[axis] = row % loops.sizes[axis];
      row /= loops.sizes[axis];
      for (int k = 0; k < kMaxOperands; ++k) offset[k] += index_[axis] * loops.strides[k][axis];
    }
  }

  void next() {
    for (int axis = static_cast<int>(loops_.axes) - 2; axis >= 0; --axis) {
      for (int k = 0; k < kMaxOperands; ++k) offset[k] += loops_.strides[k][axis];
      if (++index_[axis] < loops_.sizes[axis]) return;
      for (int k = 0; k < kMaxOperands; ++k) offset[k] -= loops_.sizes[axis] * loops_.strides[k][axis];
      index_[axis] = 0;
    }
  }

  int64_t offset[kMaxOperands] = {};

 private:
  const Loops& loops_;
  int64_t index_[kMaxAxes] = {};
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t rows_of(const Loops& loops) {
  int64_t rows = 1;
  for (int64_t axis = 0; axis + 1 < loops.axes; ++axis) rows *= loops.sizes[axis];
  return rows;
}

// How all elements are cut: rows into runs, and consecutive runs into units. By the sizes alone.
struct Units {
  explicit Units(const Loops& loops)
      : inner(loops.sizes[loops.axes - 1]),
        runs_per_row(ceil_div(inner, kRun)),
        runs(rows_of(loops) * runs_per_row),
        runs_per_unit(std::max<int64_t>(1, kUnit / std::min(inner, kRun))),
        count(ceil_div(runs, runs_per_unit)) {}

  int64_t inner, runs_per_row, runs, runs_per_unit, count;
};

// `body(unit, offsets, start, length)` for each run of each unit.
template <class Body>
void for_each_run(const Loops& loops, const Units& units, int threads, const Body& body) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < units.count; ++unit) {
    const int64_t first = unit * units.runs_per_unit, last = std::min(units.runs, first + units.runs_per_unit);
    Walk walk(loops, first / units.runs_per_row);
    int64_t segment = first % units.runs_per_row;
    for (int64_t run = first; run < last; ++run) {
      body(unit, walk.offset, segment * kRun, std::min(kRun, units.inner - segment * kRun));
      if (++segment == units.runs_per_row) {
        segment = 0;
        walk.next();
      }
    }
  }
}

}  // namespace
