// What the native kernels share: matrix products, transposes, vectors, exp, aligned memory.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

extern "C" {  // of libtorch_cpu
#define GEMM(type)                                                                             \
  (const char*, const char*, const int*, const int*, const int*, const type*, const type*,    \
   const int*, const type*, const int*, const type*, type*, const int*)
void sgemm_ GEMM(float);
void dgemm_ GEMM(double);
#undef GEMM
}

namespace {

inline auto blas(float) { return sgemm_; }
inline auto blas(double) { return dgemm_; }

// Row-major C[m, n] = alpha * A[m, k] B[k, n] + beta * C; a flag marks a transposed factor.
template <class T>
void product(bool at, bool bt, int m, int n, int k, T alpha, const T* a, int64_t lda, const T* b,
             int64_t ldb, T beta, T* c, int64_t ldc) {
  const int strides[] = {int(ldb), int(lda), int(ldc)};
  blas(T())(bt ? "T" : "N", at ? "T" : "N", &n, &m, &k, &alpha, b, strides, a, strides + 1, &beta,
            c, strides + 2);
}

// Vectors of 64 bytes, which the compiler splits where registers are smaller.
template <class T> struct Lanes;
template <> struct Lanes<float> {
  typedef float V __attribute__((vector_size(64), may_alias));
  typedef int32_t I __attribute__((vector_size(64), may_alias));
  static constexpr int N = 16, MANTISSA = 23, BIAS = 127, TERMS = 7;
  static constexpr float ROUND = 12582912.0f, LN2 = 0.693359375f, LN2_REST = -2.12194440e-4f;
  static constexpr float FLOOR = -65.0f, LOWEST = -87.0f;
};
template <> struct Lanes<double> {
  typedef double V __attribute__((vector_size(64), may_alias));
  typedef int64_t I __attribute__((vector_size(64), may_alias));
  static constexpr int N = 8, MANTISSA = 52, BIAS = 1023, TERMS = 13;
  static constexpr double ROUND = 6755399441055744.0, LN2 = 0.693145751953125,
                          LN2_REST = 1.42860682030941723212e-6;
  static constexpr double FLOOR = -700.0, LOWEST = -708.0;
};
template <class T> using Vec = typename Lanes<T>::V;
template <class T> using Int = typename Lanes<T>::I;

template <class T> inline Vec<T>& at(T* x) { return *reinterpret_cast<Vec<T>*>(x); }
template <class T> inline Vec<T> at(const T* x) { return *reinterpret_cast<const Vec<T>*>(x); }

template <class T> inline T sum(Vec<T> x) {
  T total = 0;
  for (int i = 0; i < Lanes<T>::N; i++) total += x[i];
  return total;
}

// As `sum`, by halves: of a short product the sum of its lanes one by one would take most time.
template <class T> inline T folded(Vec<T> x) {
  typedef T Half __attribute__((vector_size(32))), Quarter __attribute__((vector_size(16)));
  Half halves[2];
  std::memcpy(halves, &x, sizeof x);
  halves[0] += halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, halves, sizeof quarters);
  quarters[0] += quarters[1];
  T total = 0;
  for (int i = 0; i < Lanes<T>::N / 4; i++) total += quarters[0][i];
  return total;
}

template <class T> inline Vec<T> at_most(Vec<T> x, T limit) {
  return x > limit ? Vec<T>{} + limit : x;
}

// exp(x) for x <= 88, and 0 below `low`: 2^n * exp(r) with |r| <= log(2) / 2. NaN stays NaN.
template <class T> inline Vec<T> exponential(Vec<T> x, T low) {
  using L = Lanes<T>;
  const Vec<T> inside = x < low ? Vec<T>{} + low : x;
  const Vec<T> rounded = inside * T(1.4426950408889634) + L::ROUND;  // n in the lowest bits
  const Vec<T> n = rounded - L::ROUND, r = inside - n * L::LN2 - n * L::LN2_REST;
  Vec<T> series = Vec<T>{} + T(1);
  for (int i = L::TERMS; i > 0; i--) series = series * (r * T(1.0 / i)) + T(1);
  const Int<T> power = ((Int<T>)rounded + L::BIAS) << L::MANTISSA;
  return x < low ? Vec<T>{} : series * (Vec<T>)power;
}

// `to` is the transpose of the rows `from`, or is added to; a tile of 16 x 16 at a time.
template <class T> void transpose(const T* from, int64_t stride, int64_t rows, int64_t columns,
                                  T* to, int64_t to_stride, bool add) {
  constexpr int64_t SIDE = 16;
  for (int64_t i = 0; i < rows; i += SIDE)
    for (int64_t j = 0; j < columns; j += SIDE)
      for (int64_t b = j; b < std::min(columns, j + SIDE); b++)
        for (int64_t a = i; a < std::min(rows, i + SIDE); a++)
          to[b * to_stride + a] = from[a * stride + b] + (add ? to[b * to_stride + a] : T(0));
}

template <class T> struct Free {
  void operator()(T* x) const { ::operator delete[](x, std::align_val_t(64)); }
};
template <class T> using Buffer = std::unique_ptr<T[], Free<T>>;
template <class T> Buffer<T> buffer(int64_t size) {
  T* data = static_cast<T*>(::operator new[](size * sizeof(T), std::align_val_t(64)));
  return Buffer<T>(new (data) T[size]());
}

}  // namespace
