// The feature map elu(x) + 1 and its gradient, and loops over rows that threads share.

#pragma once

#include "call.h"

namespace {

constexpr int64_t PART = 1 << 14;  // numbers of a task

// The places of [batch, heads, rows, width]; rows are contiguous.
struct Rows {
  int64_t batch, heads, rows, width, strides[3];

  int64_t parts() const { return (rows + step() - 1) / step(); }
  int64_t step() const { return std::max<int64_t>(1, PART / width); }
  int64_t tasks() const { return batch * heads * parts(); }
};

// `change(from, at, size)` for runs of numbers: `from` is a place in x, `at` that of a contiguous
// result. Inside a parallel region, whose threads share the runs.
template <class T, class F> void each(const Rows& shape, const T* x, const F& change) {
  const int64_t step = shape.step(), parts = shape.parts(), width = shape.width;
#pragma omp for
  for (int64_t task = 0; task < shape.tasks(); ++task) {
    const int64_t head = task / parts, start = task % parts * step;
    const int64_t count = std::min(step, shape.rows - start);
    const T* from = x + head / shape.heads * shape.strides[0] +
                    head % shape.heads * shape.strides[1] + start * shape.strides[2];
    const int64_t at = (head * shape.rows + start) * width;
    if (shape.strides[2] == width) {
      change(from, at, count * width);
      continue;
    }
    for (int64_t row = 0; row < count; ++row)
      change(from + row * shape.strides[2], at + row * width, width);
  }
}

template <class T> Vec<T> load(const T* x) {
  Vec<T> loaded;
  std::memcpy(&loaded, x, sizeof(loaded));
  return loaded;
}

// `change` makes a vector of results from two vectors; the last numbers go through a buffer.
template <class T, class F>
void vectors(const T* x, const T* y, T* out, int64_t size, const F& change) {
  constexpr int64_t N = Lanes<T>::N;
  const int64_t whole = size / N * N;
  for (int64_t i = 0; i < whole; i += N) {
    const Vec<T> result = change(load(x + i), load(y + i));
    std::memcpy(out + i, &result, sizeof(result));
  }
  if (whole == size) return;
  T last_x[N] = {}, last_y[N] = {};
  std::copy(x + whole, x + size, last_x);
  std::copy(y + whole, y + size, last_y);
  const Vec<T> result = change(load(last_x), load(last_y));
  std::memcpy(out + whole, &result, (size - whole) * sizeof(T));
}

// x + 1 above zero, else exp(x). Results below the smallest normal number are 0.
template <class T> void elu1(const T* x, T* out, int64_t size) {
  vectors(x, x, out, size, [](Vec<T> x, Vec<T>) {
    return x > 0 ? x + 1 : exponential<T>(at_most(x, T(0)), Lanes<T>::LOWEST);
  });
}

// Of the mapped x: the slope is the smaller one of it and 1. `out` may be `grad`.
template <class T> void elu1_gradient(const T* mapped, const T* grad, T* out, int64_t size) {
  vectors(mapped, grad, out, size, [](Vec<T> x, Vec<T> grad) { return grad * at_most(x, T(1)); });
}

}  // namespace
