// The chunked form on a CPU: a state between chunks, weights within a chunk, one head at a time.
//
// It computes the sums of chunked.py; step.py has the same steps for all heads together. The
// arrays of a chunk stay in the cache of a core: its monomials are [monomials, tokens], all others
// have a row per token. Each head writes to memory of its own, so that results do not depend on the
// number of threads. native_chunks.py fills in `Call` and describes its fields.

#include "call.h"

namespace {

template <class T> struct Call {
  const T *q, *k, *v, *state, *dsums, *weights;
  const double *log_decay, *coefficients;
  const int64_t *parents, *factors;
  T *sums, *last, *kept, *dq, *dk, *dv, *dstate;
  int64_t heads, groups, queries, keys, width, channels;
  int64_t monomials, rows, terms, chunk, causal, ends, threads;
};

// The monomials of tokens, or the tokens themselves where these are the monomials.
template <class T> struct Features {
  const T* data;
  int64_t stride;
  bool by_token;
};

template <class T> class Head {
  using L = Lanes<T>;
  const Call<T>& c;
  const int64_t stride;  // of rows that hold a number per token of a chunk
  const bool linear;     // the monomials are the channels of the tokens
  Buffer<T> features, dfeatures, scores, dweights, weighted, rows, dstate_read, fading;
  Buffer<T> coefficients, read, added, current;
  Buffer<double> total;
  T kept_part = 1;  // of the state before a chunk
  bool empty = true;
  int64_t n = 0;

 public:
  Head(const Call<T>& c, bool backward)
      : c(c), stride((c.chunk + L::N - 1) / L::N * L::N + L::N),
        linear(c.rows == c.width && c.monomials == c.width + 1),
        features(buffer<T>(linear ? 0 : c.monomials * stride)),
        dfeatures(buffer<T>(linear || !backward ? 0 : c.monomials * stride)),
        scores(buffer<T>(c.chunk * stride)), dweights(buffer<T>(backward ? c.chunk * stride : 0)),
        weighted(buffer<T>(c.channels * c.rows)), rows(buffer<T>(c.chunk * c.channels)),
        dstate_read(buffer<T>(backward ? c.channels * c.rows : 0)), fading(buffer<T>(stride)),
        coefficients(buffer<T>(c.terms)), read(buffer<T>(stride)), added(buffer<T>(stride)),
        current(buffer<T>(backward ? 0 : c.channels * c.rows)), total(buffer<double>(stride)) {
    for (int64_t n = 0; n < c.terms; n++) coefficients[n] = T(c.coefficients[n]);
  }

  void forward(int64_t head);
  void backward(int64_t head);

 private:
  int64_t past() const { return c.causal ? c.keys - c.queries : c.keys; }  // keys before the queries
  int64_t size() const { return c.channels * c.rows; }                     // of a state
  int64_t length(int64_t start, int64_t end) const { return std::min(c.chunk, end - start); }
  const T* key(int64_t s) const { return c.k + (n * c.keys + s) * c.width; }
  const T* value(int64_t s) const { return c.v + (n * c.keys + s) * c.channels; }
  int64_t query(int64_t g, int64_t t) const { return (n * c.groups + g) * c.queries + t; }

  void decays(int64_t start, int64_t count);
  Features<T> monomials(const T* x, int64_t count);
  void columns_gradient(int64_t count, T* dx);
  void scaled_rows(const T* from, const T* factors, int64_t count);
  void add_keys(int64_t start, int64_t count, T* state);
  void weigh_state(const T* state);
  void read_state(int64_t g, int64_t t, int64_t count, const T* state);
  void own_keys(int64_t g, int64_t t, int64_t count);
  void own_gradients(int64_t g, int64_t t, int64_t count);
  void read_gradients(int64_t g, int64_t t, int64_t count, T beta);
  void feature_gradients(const T* state, const T* with, int64_t count, T* dx);
  void key_gradients(int64_t start, int64_t count, const T* dstate);
  const T* fading_of(int64_t i);
};

// The factors of decays in the chunk of keys from `start` on.
template <class T> void Head<T>::decays(int64_t start, int64_t count) {
  kept_part = 1;
  if (!c.log_decay) return;
  const double* log_decay = c.log_decay + n * c.keys + start;
  double sum = 0;
  for (int64_t i = 0; i < count; i++) total[i] = sum += log_decay[i];
  const auto factor = [](double x) { return x < L::FLOOR ? T(0) : T(std::exp(T(std::min(x, 0.0)))); };
  for (int64_t i = 0; i < count; i++) {
    read[i] = factor(total[i]);
    added[i] = factor(sum - total[i]);
  }
  kept_part = factor(sum);
}

// The monomials of rows x: each is the product of an earlier one and a channel.
template <class T> Features<T> Head<T>::monomials(const T* x, int64_t count) {
  if (linear) return {x, c.width, true};
  T* f = features.get();
  std::fill(f, f + stride, T(1));
  if (c.monomials > 1) transpose(x, c.width, count, c.width, f + stride, stride, false);
  for (int64_t r = c.width + 1; r < c.monomials; r++) {
    T* out = f + r * stride;
    const T *a = f + c.parents[r] * stride, *b = f + (1 + c.factors[r]) * stride;
    for (int64_t i = 0; i < count; i += L::N) at(out + i) = at(a + i) * at(b + i);
  }
  return {f + (c.monomials - c.rows) * stride, stride, false};
}

// Add to rows dx what follows from the gradients of their monomials, which it overwrites.
template <class T> void Head<T>::columns_gradient(int64_t count, T* dx) {
  T *f = features.get(), *df = dfeatures.get();
  if (c.monomials == 1) return;
  for (int64_t r = c.monomials - 1; r > c.width; r--) {
    const T* grad = df + r * stride;
    T *da = df + c.parents[r] * stride, *db = df + (1 + c.factors[r]) * stride;
    const T *a = f + c.parents[r] * stride, *b = f + (1 + c.factors[r]) * stride;
    for (int64_t i = 0; i < count; i += L::N) {
      const Vec<T> g = at(grad + i), by_a = g * at(b + i), by_b = g * at(a + i);
      at(da + i) += by_a;
      at(db + i) += by_b;  // after `da`: it may be the same row
    }
  }
  transpose(df + stride, stride, c.width, count, dx, c.width, true);
}

// `rows`: those from `from` on, times factors.
template <class T> void Head<T>::scaled_rows(const T* from, const T* factors, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t e = 0; e < c.channels; e++)
      rows[i * c.channels + e] = from[i * c.channels + e] * (c.log_decay ? factors[i] : T(1));
}

// Add a chunk of keys to the state, which fades.
template <class T> void Head<T>::add_keys(int64_t start, int64_t count, T* state) {
  if (!empty && kept_part != 1)
    for (int64_t i = 0; i < size(); i++) state[i] *= kept_part;
  const T* values = value(start);
  if (c.log_decay) {
    scaled_rows(values, added.get(), count);
    values = rows.get();
  }
  const Features<T> found = monomials(key(start), count);
  product<T>(true, !found.by_token, c.channels, c.rows, count, T(1), values, c.channels, found.data,
             found.stride, T(empty ? 0 : 1), state, c.rows);
  empty = false;
}

// Prepare what all queries of a chunk read from a state.
template <class T> void Head<T>::weigh_state(const T* state) {
  for (int64_t e = 0; e < c.channels; e++)
    for (int64_t r = 0; r < c.rows; r++)
      weighted[e * c.rows + r] = c.weights[r] * state[e * c.rows + r];
}

// The sums of queries over the weighted state, if there is one.
template <class T> void Head<T>::read_state(int64_t g, int64_t t, int64_t count, const T* state) {
  T* out = c.sums + query(g, t) * c.channels;
  if (!state) {
    std::fill_n(out, count * c.channels, T(0));
    return;
  }
  const Features<T> found = monomials(c.q + query(g, t) * c.width, count);
  product<T>(!found.by_token, true, count, c.channels, c.rows, T(1), found.data, found.stride,
             weighted.get(), c.rows, T(0), out, c.channels);
  if (c.causal && c.log_decay)
    for (int64_t i = 0; i < count; i++)
      for (int64_t e = 0; e < c.channels; e++) out[i * c.channels + e] *= read[i];
}

// exp(G_t - G_s) for query i of a chunk and its keys up to i.
template <class T> const T* Head<T>::fading_of(int64_t i) {
  for (int64_t j = 0; j <= i; j++) fading[j] = T(std::min(total[i] - total[j], 0.0));
  for (int64_t j = 0; j <= i; j += L::N)
    at(fading.get() + j) = exponential<T>(at_most(at(fading.get() + j), T(0)), L::FLOOR);
  return fading.get();
}

// Add the sums of queries over the keys of their own chunk, up to the query's.
template <class T> void Head<T>::own_keys(int64_t g, int64_t t, int64_t count) {
  const int64_t s = past() + t;
  product<T>(false, true, count, count, c.width, T(1), c.q + query(g, t) * c.width, c.width, key(s),
             c.width, T(0), scores.get(), stride);
  for (int64_t i = 0; i < count; i++) {
    T* x = scores.get() + i * stride;
    const T* fade = c.log_decay ? fading_of(i) : nullptr;
    for (int64_t j = 0; j <= i; j += L::N) {
      Vec<T> weight = Vec<T>{} + coefficients[c.terms - 1];
      for (int64_t n = c.terms - 2; n >= 0; n--) weight = weight * at(x + j) + coefficients[n];
      at(x + j) = fade ? weight * at(fade + j) : weight;
    }
    std::fill(x + i + 1, x + count, T(0));
  }
  product<T>(false, false, count, c.channels, count, T(1), scores.get(), stride, value(s),
             c.channels, T(1), c.sums + query(g, t) * c.channels, c.channels);
}

template <class T> void Head<T>::forward(int64_t head) {
  n = head;
  T* state = current.get();
  T* kept = c.kept + n * size();  // the states that the backward pass needs; the next one is
  const int64_t every = c.heads * size();  // after those of all heads
  empty = !c.state;
  if (c.state) std::copy_n(c.state + n * size(), size(), state);
  const auto keep = [&] {
    if (c.kept) std::copy_n(state, size(), kept), kept += every;
  };
  for (int64_t s = 0; s < past(); s += c.chunk) {
    const int64_t count = length(s, past());
    decays(s, count);
    add_keys(s, count, state);
  }
  if (past()) keep();
  for (int64_t t = 0; t < c.queries; t += c.chunk) {
    const int64_t count = length(t, c.queries);
    const bool last = t + count == c.queries;
    if (c.causal) decays(past() + t, count);
    if (!empty) weigh_state(state);
    for (int64_t g = 0; g < c.groups; g++) {
      read_state(g, t, count, empty ? nullptr : state);
      if (c.causal) own_keys(g, t, count);
    }
    if (c.causal && (!last || c.last)) {
      add_keys(past() + t, count, state);
      if (!last) keep();
    }
  }
  if (c.last && empty) std::fill_n(c.last + n * size(), size(), T(0));
  if (c.last && !empty) std::copy_n(state, size(), c.last + n * size());
}

// Of the pairs within a chunk.
template <class T> void Head<T>::own_gradients(int64_t g, int64_t t, int64_t count) {
  const int64_t s = past() + t;
  const T *q = c.q + query(g, t) * c.width, *dsums = c.dsums + query(g, t) * c.channels;
  T *w = scores.get(), *dw = dweights.get();
  product<T>(false, true, count, count, c.width, T(1), q, c.width, key(s), c.width, T(0), w, stride);
  product<T>(false, true, count, count, c.channels, T(1), dsums, c.channels, value(s), c.channels,
             T(0), dw, stride);
  for (int64_t i = 0; i < count; i++) {
    T *x = w + i * stride, *dx = dw + i * stride;
    const T* fade = c.log_decay ? fading_of(i) : nullptr;
    for (int64_t j = 0; j <= i; j += L::N) {
      const Vec<T> score = at(x + j);
      Vec<T> weight = Vec<T>{} + coefficients[c.terms - 1], slope = {};
      for (int64_t n = c.terms - 2; n >= 0; n--) {
        slope = slope * score + weight;
        weight = weight * score + coefficients[n];
      }
      at(x + j) = fade ? weight * at(fade + j) : weight;
      at(dx + j) *= fade ? slope * at(fade + j) : slope;
    }
    std::fill(x + i + 1, x + count, T(0));
    std::fill(dx + i + 1, dx + count, T(0));
  }
  T *dk = c.dk + (n * c.keys + s) * c.width, *dv = c.dv + (n * c.keys + s) * c.channels;
  product<T>(true, false, count, c.channels, count, T(1), w, stride, dsums, c.channels, T(1), dv,
             c.channels);
  product<T>(true, false, count, c.width, count, T(1), dw, stride, q, c.width, T(1), dk, c.width);
  product<T>(false, false, count, c.width, count, T(1), dw, stride, key(s), c.width, T(1),
             c.dq + query(g, t) * c.width, c.width);
}

// Of the queries that read the weighted state, and of this state, added to beta times those there.
template <class T>
void Head<T>::read_gradients(int64_t g, int64_t t, int64_t count, T beta) {
  const T* dsums = c.dsums + query(g, t) * c.channels;
  T* dq = c.dq + query(g, t) * c.width;
  if (c.causal && c.log_decay) {
    scaled_rows(dsums, read.get(), count);
    dsums = rows.get();
  }
  const Features<T> found = monomials(c.q + query(g, t) * c.width, count);
  product<T>(true, !found.by_token, c.channels, c.rows, count, T(1), dsums, c.channels, found.data,
             found.stride, beta, dstate_read.get(), c.rows);
  feature_gradients(weighted.get(), dsums, count, dq);
}

// Add to rows dx the gradients of monomials: a state's gradient times the rows that go with it.
template <class T>
void Head<T>::feature_gradients(const T* state, const T* with, int64_t count, T* dx) {
  if (linear)
    return product<T>(false, false, count, c.rows, c.channels, T(1), with, c.channels, state,
                      c.rows, T(1), dx, c.width);
  const int64_t unused = c.monomials - c.rows;
  std::fill_n(dfeatures.get(), unused * stride, T(0));
  product<T>(true, true, c.rows, count, c.channels, T(1), state, c.rows, with, c.channels, T(0),
             dfeatures.get() + unused * stride, stride);
  columns_gradient(count, dx);
}

// Of the keys that were added to the state.
template <class T>
void Head<T>::key_gradients(int64_t start, int64_t count, const T* dstate) {
  const T* values = value(start);
  T* dv = c.dv + (n * c.keys + start) * c.channels;
  if (c.log_decay) {
    scaled_rows(values, added.get(), count);
    values = rows.get();
  }
  const Features<T> found = monomials(key(start), count);
  feature_gradients(dstate, values, count, c.dk + (n * c.keys + start) * c.width);
  T* by_value = rows.get();
  product<T>(!found.by_token, true, count, c.channels, c.rows, T(1), found.data, found.stride,
             dstate, c.rows, T(0), by_value, c.channels);
  for (int64_t i = 0; i < count; i++)
    for (int64_t e = 0; e < c.channels; e++)
      dv[i * c.channels + e] += by_value[i * c.channels + e] * (c.log_decay ? added[i] : T(1));
}

// `dstate` is that of the state after all keys, and becomes that of the first state.
template <class T> void Head<T>::backward(int64_t head) {
  n = head;
  T* dstate = c.dstate + n * size();
  const int64_t every = c.heads * size(), chunks = (c.queries + c.chunk - 1) / c.chunk;
  const T* first = c.state ? c.state + n * size() : nullptr;
  std::fill_n(c.dq + query(0, 0) * c.width, c.groups * c.queries * c.width, T(0));
  std::fill_n(c.dk + n * c.keys * c.width, c.keys * c.width, T(0));
  std::fill_n(c.dv + n * c.keys * c.channels, c.keys * c.channels, T(0));
  for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
    const int64_t t = chunk * c.chunk, count = length(t, c.queries);
    const int64_t place = (c.causal ? chunk : 0) - (past() ? 0 : 1);  // of the state that it read
    const T* state = place < 0 ? first : c.kept + n * size() + place * every;
    if (c.causal) decays(past() + t, count);
    if (state) weigh_state(state);
    for (int64_t g = 0; g < c.groups; g++) {
      if (c.causal) own_gradients(g, t, count);
      if (state) read_gradients(g, t, count, T(g ? 1 : 0));
    }
    if (c.causal && (c.ends || chunk + 1 < chunks)) key_gradients(past() + t, count, dstate);
    for (int64_t e = 0, i = 0; e < c.channels; e++)
      for (int64_t r = 0; r < c.rows; r++, i++)
        dstate[i] = (c.causal ? kept_part : T(1)) * dstate[i] +
                    (state ? c.weights[r] * dstate_read[i] : T(0));
  }
  for (int64_t s = (past() - 1) / c.chunk * c.chunk; s >= 0 && past(); s -= c.chunk) {
    const int64_t count = length(s, past());
    decays(s, count);
    key_gradients(s, count, dstate);
    if (kept_part != 1)
      for (int64_t i = 0; i < size(); i++) dstate[i] *= kept_part;
  }
}

template <class T> void run(const Call<T>& c, void (Head<T>::*pass)(int64_t), bool backward) {
#pragma omp parallel num_threads(std::min(c.threads, c.heads))
  {
    Head<T> head(c, backward);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < c.heads; n++) (head.*pass)(n);
  }
}

}  // namespace

extern "C" {
void chunk_sums_float32(const Call<float>* c) { run(*c, &Head<float>::forward, false); }
void chunk_sums_float64(const Call<double>* c) { run(*c, &Head<double>::forward, false); }
void chunk_gradients_float32(const Call<float>* c) { run(*c, &Head<float>::backward, true); }
void chunk_gradients_float64(const Call<double>* c) { run(*c, &Head<double>::backward, true); }
}
