// The feature map elu(x) + 1 and its gradient, in one pass each. native_maps.py fills in `Call`.

#include "maps.h"

namespace {

template <class T> struct Call {
  const T *x, *grad;
  T* out;
  Rows shape;  // of x; the gradient and the result are contiguous
  int64_t threads;
};

template <class T, class F> void in_parallel(const Call<T>& c, const F& change) {
#pragma omp parallel num_threads(c.threads) if (c.shape.tasks() > 1)
  each(c.shape, c.x, change);
}

template <class T> void forward(const Call<T>& c) {
  in_parallel(c, [&](const T* x, int64_t at, int64_t size) { elu1(x, c.out + at, size); });
}

template <class T> void backward(const Call<T>& c) {
  in_parallel(c, [&](const T* mapped, int64_t at, int64_t size) {
    elu1_gradient(mapped, c.grad + at, c.out + at, size);
  });
}

}  // namespace

extern "C" {
void elu1_float32(const Call<float>* c) { forward(*c); }
void elu1_float64(const Call<double>* c) { forward(*c); }
void elu1_gradient_float32(const Call<float>* c) { backward(*c); }
void elu1_gradient_float64(const Call<double>* c) { backward(*c); }
}
