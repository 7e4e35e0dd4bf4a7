// The feature map elu(x) + 1 and its gradient, in one pass each.

#include "native.h"

namespace {

constexpr int64_t PART = 1 << 14;  // numbers of a task

template <class T> struct Call {
  const T *x, *grad;
  T* out;
  int64_t size, threads;
};

// `change` makes a vector of results from the place of a vector; the last ones go through a buffer.
template <class T, class F> void each(const Call<T>& c, F&& change) {
  constexpr int64_t N = Lanes<T>::N;
#pragma omp parallel for num_threads(c.threads) if (c.size > PART)
  for (int64_t start = 0; start < c.size; start += PART) {
    const int64_t end = std::min(c.size, start + PART), whole = start + (end - start) / N * N;
    for (int64_t i = start; i < whole; i += N) {
      const Vec<T> result = change(c.x + i, c.grad ? c.grad + i : nullptr);
      std::memcpy(c.out + i, &result, sizeof(result));
    }
    if (whole == end) continue;
    T x[N] = {}, grad[N] = {};
    std::copy(c.x + whole, c.x + end, x);
    if (c.grad) std::copy(c.grad + whole, c.grad + end, grad);
    const Vec<T> result = change(x, grad);
    std::memcpy(c.out + whole, &result, (end - whole) * sizeof(T));
  }
}

template <class T> Vec<T> load(const T* x) {
  Vec<T> loaded;
  std::memcpy(&loaded, x, sizeof(loaded));
  return loaded;
}

// x + 1 above zero, else exp(x). Results below the smallest normal number are 0.
template <class T> void forward(const Call<T>& c) {
  each<T>(c, [](const T* from, const T*) {
    const Vec<T> x = load(from), below = at_most(x, T(0));
    return x > 0 ? x + 1 : exponential<T>(below, Lanes<T>::LOWEST);
  });
}

// Of the mapped x: the slope is the smaller one of it and 1.
template <class T> void backward(const Call<T>& c) {
  each<T>(c, [](const T* mapped, const T* grad) {
    return load(grad) * at_most(load(mapped), T(1));
  });
}

}  // namespace

extern "C" {
void elu1_float32(const Call<float>* c) { forward(*c); }
void elu1_float64(const Call<double>* c) { forward(*c); }
void elu1_gradient_float32(const Call<float>* c) { backward(*c); }
void elu1_gradient_float64(const Call<double>* c) { backward(*c); }
}
