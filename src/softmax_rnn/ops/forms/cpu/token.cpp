// One token after a state: the recurrence of section 3.1, in one pass over the state of each head.
//
// The key is added to the state first, so that the same pass reads the sums over all keys. With a
// window it is the key that leaves the window, if it is visible and none of the first keys; the
// token then attends to the keys of the window and the first keys by exp, under one denominator.
// Queries and keys outside the window are given, or made here of those inside. token.py fills in
// `Call` and describes its fields.

#include "call.h"

namespace {

// Keys that a state keeps, and where those of the next state go: keys [heads, N, near_width], values
// [heads, N, values], the keys outside the window [heads, N, width] or null if they are the same;
// `visible` [batch, N]. What does not change has no next one.
template <class T> struct Kept {
  const T *k, *v, *outside;
  const uint8_t* visible;
  T *next_k, *next_v, *next_outside;
  uint8_t* next_visible;
};

template <class T> struct Call {
  const T *q, *k, *v, *state, *weights;
  const double* log_decay;
  const T *magnitudes, *largest;
  const double* roundings;
  const int64_t *parents, *factors;
  T *out, *next;
  T *next_magnitudes, *next_largest;
  // With a window; all null without one. `near` are those of exp, of another width.
  const T *near_q, *near_k, *factor;
  Kept<T> recent, first_keys;
  // What makes the queries and keys outside it: the inverse of a rotation, matrices, shifts.
  const T *own, *other, *q_matrix, *q_shift, *k_matrix, *k_shift;
  const int64_t* places;
  int64_t heads, groups, width, values, monomials, rows, map, first, powers, threads;
  int64_t kv_heads, window, first_count, near_width, made, angles;
  double scale, guard, growth, near_scale, map_scale;
  // What was found.
  int64_t unsure, settled;
  double largest_key, largest_value;
};

enum { GIVEN, SQUARED_RELU, HEDGEHOG };

template <class T> struct Head {
  const Call<T>& c;
  Buffer<T> added, read, sums, scores, straight, made;
  Buffer<double> tops;  // the largest magnitude of each power
  double largest_key = 0, largest_value = 0;
  bool unsure = false, settled = true;
  const T *far_q, *far_k;  // of the group of this key/value head

  explicit Head(const Call<T>& c)
      : c(c), added(buffer<T>(c.monomials)), read(buffer<T>(c.groups * c.monomials)),
        sums(buffer<T>(c.groups * (c.values + 1))),
        scores(buffer<T>(c.window + c.first_count + 1)), straight(buffer<T>(c.near_width)),
        made(buffer<T>(c.made ? (c.groups + 1) * c.width : 0)), tops(buffer<double>(c.powers)) {}

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

  // The queries and the key of a head outside the window.
  void find_far(int64_t n) {
    far_q = c.q + n * c.groups * c.width, far_k = c.k + n * c.width;
    if (!c.made) return;
    const int64_t b = n / c.kv_heads, head = n % c.kv_heads;
    T* to = made.get();
    make(c.near_k + n * c.near_width, b, head, c.k_matrix, c.k_shift, to);
    far_k = to, far_q = to + c.width;
    for (int64_t g = 0; g < c.groups; g++)
      make(c.near_q + (n * c.groups + g) * c.near_width, b, head * c.groups + g, c.q_matrix,
           c.q_shift, to += c.width);
  }

  // The features of a query or key: as it was before positions, times the matrix of its head.
  void make(const T* x, int64_t b, int64_t head, const T* matrix, const T* shift, T* to) {
    if (c.own) {
      const T *own = c.own + b * c.angles, *other = c.other + b * c.angles;
      for (int64_t d = 0; d < c.near_width; d++)
        straight[d] = x[d] * own[d] + x[c.places[d]] * other[d];
      x = straight.get();
    }
    const int64_t rows = c.made == HEDGEHOG ? c.width / 2 : c.width;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t row = head * rows + r;
      const T y = T(c.map_scale) * product_of(matrix + row * c.near_width, x, c.near_width) +
                  (shift ? shift[row] : T(0));
      to[r] = c.made == HEDGEHOG ? y : y < 0 ? T(0) : y * y;  // NaN stays
    }
    if (c.made != HEDGEHOG) return;
    const T high = *std::max_element(to, to + rows), low = *std::min_element(to, to + rows);
    T up = 0, down = 0;
    for (int64_t r = 0; r < rows; r++) {
      down += to[rows + r] = std::exp(low - to[r]);
      up += to[r] = std::exp(to[r] - high);
    }
    for (int64_t r = 0; r < rows; r++) to[r] /= up, to[rows + r] /= down;
  }

  void run(int64_t n) {
    find_far(n);
    const int64_t unused = c.monomials - c.rows, channels = c.values + 1;
    const T *key = far_k, *value = c.v + n * c.values;
    bool adds = true;
    if (c.window) {
      adds = leave(n);
      key = (c.recent.outside ? c.recent.outside : c.recent.k) + n * c.window * c.width;
      value = c.recent.v + n * c.window * c.values;
    }
    if (adds) {
      const double size = expand(key, T(1), added.get());
      largest_key = size <= largest_key ? largest_key : size;
    }
    for (int64_t g = 0; g < c.groups; g++) {
      T* f = read.get() + g * c.monomials;
      expand(far_q + g * c.width, T(c.scale), f);
      for (int64_t r = 0; r < c.rows; r++) f[unused + r] *= c.weights[r];
    }
    const double decay = c.log_decay ? c.log_decay[n] : 0;
    const T kept = decay < Lanes<T>::FLOOR ? T(0) : T(std::exp(decay)), *f = added.get() + unused;
    add_magnitudes(n, kept, adds ? key : nullptr);
    for (int64_t e = 0; e < channels; e++) {
      const T each = e < c.values ? value[e] : T(1);
      if (adds && e < c.values)
        largest_value = std::abs(double(each)) <= largest_value ? largest_value : std::abs(each);
      const T* old = c.state + (n * channels + e) * c.rows;
      T* next = c.next + (n * channels + e) * c.rows;
      if (adds)
        for (int64_t r = 0; r < c.rows; r++) next[r] = kept * old[r] + each * f[r];
      else
        std::copy_n(old, c.rows, next);
      for (int64_t g = 0; g < c.groups; g++)
        sums[g * channels + e] = dot(next, read.get() + g * c.monomials + unused);
    }
    for (int64_t g = 0; g < c.groups; g++) {
      T* each = sums.get() + g * channels;
      const double far = c.window ? attend(n, g, each) : 1;
      const T total = each[c.values];
      // A sum that may be within its rounding errors, is too small for the values, out of range or
      // not a number needs the general way.
      unsure |= !(std::abs(double(total)) > most_noise(n, g) * far) || !std::isfinite(total);
      const double least = c.next_largest ? c.guard / c.next_largest[n] : 0;
      T* out = c.out + (n * c.groups + g) * c.values;
      for (int64_t e = 0; e < c.values; e++) {
        out[e] = each[e] / total;
        unsure |= !std::isfinite(each[e]) || std::abs(each[e] * least) > std::abs(double(total));
      }
    }
  }

  // Move the window and the first keys by one; whether the key that leaves belongs to the series.
  bool leave(int64_t n) {
    const int64_t W = c.window, G = c.first_count, b = n / c.kv_heads;
    const uint8_t* shown = c.recent.visible + b * W;
    // Hidden slots between visible ones are for the general way.
    for (int64_t i = 1; i < W; i++) unsure |= shown[i - 1] && !shown[i];
    int64_t firsts = 0;
    for (int64_t i = 0; i < G; i++) firsts += c.first_keys.visible[b * G + i];
    const bool leaves = shown[0], to_first = leaves && firsts < G;
    shift(c.recent.k, c.recent.next_k, n, W, c.near_width, c.near_k + n * c.near_width);
    shift(c.recent.v, c.recent.next_v, n, W, c.values, c.v + n * c.values);
    if (c.recent.outside) shift(c.recent.outside, c.recent.next_outside, n, W, c.width, far_k);
    const Kept<T>& first = c.first_keys;
    if (!c.recent.next_visible) return leaves;  // all are visible, and remain so
    settled &= (W == 1 || shown[1]) && firsts + to_first == G;
    if (G) {
      std::copy_n(first.k + n * G * c.near_width, G * c.near_width, first.next_k + n * G * c.near_width);
      std::copy_n(first.v + n * G * c.values, G * c.values, first.next_v + n * G * c.values);
    }
    if (to_first) {
      std::copy_n(c.recent.k + n * W * c.near_width, c.near_width,
                  first.next_k + (n * G + firsts) * c.near_width);
      std::copy_n(c.recent.v + n * W * c.values, c.values, first.next_v + (n * G + firsts) * c.values);
    }
    if (n % c.kv_heads == 0) {
      std::copy_n(shown + 1, W - 1, c.recent.next_visible + b * W);
      c.recent.next_visible[b * W + W - 1] = 1;
      for (int64_t i = 0; i < G; i++)
        first.next_visible[b * G + i] = first.visible[b * G + i] || (to_first && i == firsts);
    }
    return leaves && !to_first;
  }

  static void shift(const T* from, T* to, int64_t n, int64_t count, int64_t width, const T* last) {
    std::copy_n(from + (n * count + 1) * width, (count - 1) * width, to + n * count * width);
    std::copy_n(last, width, to + (n * count + count - 1) * width);
  }

  // Add the keys inside the window to the sums of a query; the factor of those outside it.
  double attend(int64_t n, int64_t g, T* each) {
    const int64_t W = c.window, G = c.first_count, b = n / c.kv_heads;
    const T* q = c.near_q + (n * c.groups + g) * c.near_width;
    const Kept<T>& first = c.first_keys;
    const uint8_t* shown = c.recent.visible + b * W;
    const int64_t hidden = std::find(shown + 1, shown + W, 1) - (shown + 1);
    int64_t firsts = 0;
    for (int64_t i = 0; i < G; i++) firsts += first.visible[b * G + i];
    firsts += G && shown[0] && firsts < G;
    const T *keys = c.recent.next_k + (n * W + hidden) * c.near_width;
    const T *early = first.next_k ? first.next_k : first.k;
    const T *early_v = first.next_v ? first.next_v : first.v;
    const int64_t count = W - hidden + firsts;
    T top = -std::numeric_limits<T>::infinity();
    for (int64_t i = 0; i < count; i++) {
      const T* k = i < firsts ? early + (n * G + i) * c.near_width : keys + (i - firsts) * c.near_width;
      scores[i] = T(c.near_scale) * product_of(q, k, c.near_width);
      top = scores[i] <= top ? top : scores[i];  // NaN stays
    }
    const double factor = c.factor ? double(c.factor[n % c.kv_heads * c.groups + g]) : 1;
    unsure |= !(factor >= 0 && std::isfinite(factor));
    bool empty = factor == 0 || each[c.values] == 0;
    for (int64_t e = 0; e < c.values && empty && factor != 0; e++) empty = each[e] == 0;
    const T largest = empty ? top : std::max(top, T(0));
    const T far = empty ? T(0) : T(std::exp(double(-largest)) * factor);
    for (int64_t e = 0; e <= c.values; e++) each[e] *= far;
    for (int64_t i = 0; i < count; i++) {
      const T weight = std::exp(scores[i] - largest);
      const T* v = i < firsts ? early_v + (n * G + i) * c.values
                              : c.recent.next_v + (n * W + hidden + i - firsts) * c.values;
      for (int64_t e = 0; e < c.values; e++) each[e] += weight * v[e];
      each[c.values] += weight;
    }
    return far;
  }

  T dot(const T* a, const T* b) const { return product_of(a, b, c.rows); }

  static T product_of(const T* a, const T* b, int64_t count) {
    constexpr int N = Lanes<T>::N;
    Vec<T> parts[2] = {}, x, y;
    int64_t r = 0;
    for (; r + 2 * N <= count; r += 2 * N)
      for (int i = 0; i < 2; i++) {
        std::memcpy(&x, a + r + i * N, sizeof x), std::memcpy(&y, b + r + i * N, sizeof y);
        parts[i] += x * y;
      }
    T rest = 0;
    for (; r < count; r++) rest += a[r] * b[r];
    return rest + folded<T>(parts[0] + parts[1]);
  }

  void add_magnitudes(int64_t n, T kept, const T* key) {
    if (!c.next_largest) return;
    T largest = c.largest[n];
    for (int64_t e = 0; e < c.values; e++) largest = std::max(largest, std::abs(c.v[n * c.values + e]));
    c.next_largest[n] = largest;
    std::fill_n(tops.get(), c.powers, 0.0);
    for (int64_t d = 0; d < c.width; d++) {
      const T size = key ? std::abs(mapped(key[d])) : T(0);
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
      const double x = c.scale * mapped(far_q[g * c.width + d]);
      square += x * x;
    }
    const double length = std::sqrt(square);
    for (int64_t i = 1; i < c.first; i++) power *= length;
    for (int64_t i = 0; i < c.powers; i++) noise += c.roundings[i] * tops[i] * (power *= length);
    // Powers of small numbers may have underflowed.
    return std::max(1e6 * double(std::numeric_limits<T>::min()), c.growth * noise);
  }
};

template <class T> void step(Call<T>& c) {
  bool unsure = false, settled = true;
  double key = 0, value = 0;
#pragma omp parallel num_threads(std::min(c.threads, c.heads)) reduction(|| : unsure) reduction(&& : settled) reduction(max : key, value) if (c.heads * c.rows * c.values > 1 << 18)
  {
    Head<T> head(c);
#pragma omp for
    for (int64_t n = 0; n < c.heads; n++) head.run(n);
    unsure = unsure || head.unsure;
    settled = settled && head.settled;
    key = std::max(key, head.largest_key);
    value = std::max(value, head.largest_value);
  }
  c.unsure = unsure, c.settled = settled, c.largest_key = key, c.largest_value = value;
}

}  // namespace

extern "C" {
void token_float32(Call<float>* c) { step(*c); }
void token_float64(Call<double>* c) { step(*c); }
}
