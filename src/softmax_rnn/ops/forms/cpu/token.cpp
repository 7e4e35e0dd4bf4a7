// One token after a state: the recurrence of section 3.1, in one pass over the state of each head.
//
// The key is added to the state first, so that the same pass reads the sums over all keys.
// native_token.py fills in `Call` and describes its fields.

#include "call.h"

namespace {

template <class T> struct Call {
  const T *q, *k, *v, *state, *weights;
  const double* log_decay;
  const T *magnitudes, *largest;
  const double* roundings;
  const int64_t *parents, *factors;
  T *out, *next;
  double* found;
  T *next_magnitudes, *next_largest;
  int64_t heads, groups, width, values, monomials, rows, map, first, powers, threads;
  double scale, guard, growth;
};

template <class T> struct Head {
  const Call<T>& c;
  Buffer<T> added, read, sums;
  Buffer<double> tops;  // the largest magnitude of each power
  double largest_key = 0, largest_value = 0;
  bool unsure = false;

  explicit Head(const Call<T>& c)
      : c(c), added(buffer<T>(c.monomials)), read(buffer<T>(c.groups * c.monomials)),
        sums(buffer<T>(c.groups * (c.values + 1))), tops(buffer<double>(c.powers)) {}

  T mapped(T x) const {
    if (c.map == 1) return x > 0 ? x + 1 : std::exp(x);
    return c.map == 2 ? std::max(x, T(0)) : x;
  }

  // The monomials of x, mapped and times a factor; the largest of the mapped ones.
  double expand(const T* x, T factor, T* f) const {
    double largest = 0;
    f[0] = 1;
    for (int64_t d = 0; d < c.width && c.monomials > 1; d++) {
      const T each = mapped(x[d]);
      largest = std::abs(each) <= largest ? largest : std::abs(double(each));
      f[1 + d] = each * factor;
    }
    for (int64_t r = c.width + 1; r < c.monomials; r++)
      f[r] = f[c.parents[r]] * f[1 + c.factors[r]];
    return largest;
  }

  void run(int64_t n) {
    const int64_t unused = c.monomials - c.rows, channels = c.values + 1;
    const double key = expand(c.k + n * c.width, T(1), added.get());
    largest_key = key <= largest_key ? largest_key : key;
    for (int64_t g = 0; g < c.groups; g++) {
      T* f = read.get() + g * c.monomials;
      expand(c.q + (n * c.groups + g) * c.width, T(c.scale), f);
      for (int64_t r = 0; r < c.rows; r++) f[unused + r] *= c.weights[r];
    }
    const double decay = c.log_decay ? c.log_decay[n] : 0;
    const T kept = decay < Lanes<T>::FLOOR ? T(0) : T(std::exp(decay)), *f = added.get() + unused;
    add_magnitudes(n, kept);
    for (int64_t e = 0; e < channels; e++) {
      const T value = e < c.values ? c.v[n * c.values + e] : T(1);
      if (e < c.values)
        largest_value = std::abs(double(value)) <= largest_value ? largest_value : std::abs(value);
      const T* old = c.state + (n * channels + e) * c.rows;
      T* next = c.next + (n * channels + e) * c.rows;
      for (int64_t r = 0; r < c.rows; r++) next[r] = kept * old[r] + value * f[r];
      for (int64_t g = 0; g < c.groups; g++)
        sums[g * channels + e] = dot(next, read.get() + g * c.monomials + unused);
    }
    for (int64_t g = 0; g < c.groups; g++) {
      const T* each = sums.get() + g * channels;
      const T total = each[c.values];
      // A sum that may be within its rounding errors, is too small for the values, out of range or
      // not a number needs the general way.
      unsure |= !(std::abs(double(total)) > most_noise(n, g)) || !std::isfinite(total);
      const double least = c.powers ? c.guard / c.next_largest[n] : 0;
      T* out = c.out + (n * c.groups + g) * c.values;
      for (int64_t e = 0; e < c.values; e++) {
        out[e] = each[e] / total;
        unsure |= !std::isfinite(each[e]) || std::abs(each[e] * least) > std::abs(double(total));
      }
    }
  }

  T dot(const T* a, const T* b) const {
    constexpr int N = 2 * Lanes<T>::N;  // independent sums, which the compiler makes vectors
    T parts[N] = {}, rest = 0;
    int64_t r = 0;
    for (; r + N <= c.rows; r += N)
      for (int i = 0; i < N; i++) parts[i] += a[r + i] * b[r + i];
    for (; r < c.rows; r++) rest += a[r] * b[r];
    for (int i = 0; i < N; i++) rest += parts[i];
    return rest;
  }

  void add_magnitudes(int64_t n, T kept) {
    if (!c.powers) return;
    T largest = c.largest[n];
    for (int64_t e = 0; e < c.values; e++) largest = std::max(largest, std::abs(c.v[n * c.values + e]));
    c.next_largest[n] = largest;
    std::fill_n(tops.get(), c.powers, 0.0);
    for (int64_t d = 0; d < c.width; d++) {
      const T size = std::abs(mapped(c.k[n * c.width + d]));
      T power = 1;
      for (int64_t i = 1; i < c.first; i++) power *= size;
      for (int64_t i = 0; i < c.powers; i++) {
        const int64_t at = (n * c.powers + i) * c.width + d;
        c.next_magnitudes[at] = kept * c.magnitudes[at] + (power *= size);
        tops[i] = std::max(tops[i], double(c.next_magnitudes[at]));
      }
    }
  }

  // An upper bound of the noise (magnitudes.py): every channel counts as the largest.
  double most_noise(int64_t n, int64_t g) const {
    double square = 0, power = 1, noise = 0;
    for (int64_t d = 0; d < c.width; d++) {
      const double x = c.scale * mapped(c.q[((n * c.groups) + g) * c.width + d]);
      square += x * x;
    }
    const double length = std::sqrt(square);
    for (int64_t i = 1; i < c.first; i++) power *= length;
    for (int64_t i = 0; i < c.powers; i++) noise += c.roundings[i] * tops[i] * (power *= length);
    // Powers of small numbers may have underflowed.
    return std::max(1e6 * double(std::numeric_limits<T>::min()), c.growth * noise);
  }
};

template <class T> void step(const Call<T>& c) {
  bool unsure = false;
  double key = 0, value = 0;
#pragma omp parallel num_threads(std::min(c.threads, c.heads)) reduction(|| : unsure) reduction(max : key, value) if (c.heads * c.rows * c.values > 1 << 18)
  {
    Head<T> head(c);
#pragma omp for
    for (int64_t n = 0; n < c.heads; n++) head.run(n);
    unsure = unsure || head.unsure;
    key = std::max(key, head.largest_key);
    value = std::max(value, head.largest_value);
  }
  c.found[0] = unsure, c.found[1] = key, c.found[2] = value;
}

}  // namespace

extern "C" {
void token_float32(const Call<float>* c) { step(*c); }
void token_float64(const Call<double>* c) { step(*c); }
}
