// The native form: tiles of scores that stay in the cache of a CPU core through both products.
//
// A task is a block of queries of one head. For each tile of keys it computes the scores, makes them
// weights in place, and multiplies these by the values; the backward pass recomputes them. The tasks
// of a call write to different memory, so results do not depend on which thread runs which.
// pairs.py fills in `Call` and describes its fields.

#include "maps.h"

namespace {

constexpr int64_t KEYS = 512;           // of a tile
constexpr int64_t STRIDE = KEYS + 16;   // of its rows: a power of two would share few cache sets

template <class T> struct Call {
  const T *q, *k, *v, *grad, *grad_sum;
  const uint8_t* mask;
  const double* total;
  const int64_t* first;
  const double* coefficients;
  T *numerator, *weight_sum, *maximum, *dq, *dk, *dv, *mapped_q, *mapped_k, *finite;
  double *by_query, *by_key;
  int64_t q_strides[3], k_strides[3], v_strides[3], grad_strides[3];
  int64_t batch, heads, kv_heads, queries, keys, width, value_width;
  int64_t block, window, causal, shifted, quotient, maps, terms, parts, threads;
  double scale, clamp;

  Rows of_queries() const {
    return {batch, heads, queries, width, {q_strides[0], q_strides[1], q_strides[2]}};
  }
  Rows of_keys() const {
    return {batch, kv_heads, keys, width, {k_strides[0], k_strides[1], k_strides[2]}};
  }
  Call mapped() const {  // with the mapped queries and keys, which are contiguous
    Call c = *this;
    c.q = mapped_q, c.k = mapped_k;
    const int64_t of_q[] = {heads * queries * width, queries * width, width};
    const int64_t of_k[] = {kv_heads * keys * width, keys * width, width};
    std::copy(of_q, of_q + 3, c.q_strides);
    std::copy(of_k, of_k + 3, c.k_strides);
    return c;
  }
};

// What a thread needs for a tile, besides the arrays of the call.
template <class T> struct Scratch {
  Buffer<T> scores, dweights, to_key, fading, by_key, coefficients, slope;
  Buffer<typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type> seen;

  Scratch(const Call<T>& c, bool backward)
      : scores(buffer<T>(c.block * STRIDE)), dweights(buffer<T>(backward ? c.block * STRIDE : 0)),
        to_key(buffer<T>(STRIDE)), fading(buffer<T>(STRIDE)), by_key(buffer<T>(STRIDE)),
        coefficients(buffer<T>(c.terms + 1)),
        seen(buffer<typename decltype(seen)::element_type>(STRIDE)) {
    for (int64_t n = 0; n < c.terms; n++) coefficients[n] = T(c.coefficients[n]);
  }
};

// A block of queries of one head, and the tile of keys that it is at.
template <class T> struct Tile {
  const Call<T>& c;
  Scratch<T>& scratch;
  int64_t b, h, kv, start, rows, past, first, last;  // kv: the key head, of all batches
  const T *q, *k, *v;
  const double* total;
  int64_t begin = 0, keys = 0;  // of the tile

  Tile(const Call<T>& c, Scratch<T>& scratch, int64_t b, int64_t h, int64_t block)
      : c(c), scratch(scratch), b(b), h(h), start(block * c.block) {
    const int64_t head = h / (c.heads / c.kv_heads);
    kv = b * c.kv_heads + head;
    rows = std::min(c.block, c.queries - start);
    past = c.keys - c.queries;
    last = c.causal ? start + rows + past : c.keys;
    first = c.window ? std::max<int64_t>(0, start + past - c.window + 1) : 0;
    if (c.first) first = std::max(first, c.first[block * c.batch * c.kv_heads + kv]);
    q = c.q + b * c.q_strides[0] + h * c.q_strides[1] + start * c.q_strides[2];
    k = c.k + b * c.k_strides[0] + head * c.k_strides[1];
    v = c.v + b * c.v_strides[0] + head * c.v_strides[1];
    total = c.total ? c.total + kv * c.keys : nullptr;
  }

  int64_t row() const { return (b * c.heads + h) * c.queries + start; }  // in [B * H * T]
  const T* tile_k() const { return k + begin * c.k_strides[2]; }
  const T* tile_v() const { return v + begin * c.v_strides[2]; }

  // The scores of the tile from key `at` on, and what its rows share.
  void open(int64_t at) {
    begin = at;
    keys = std::min(KEYS, last - begin);
    product<T>(false, true, rows, keys, c.width, T(c.scale), q, c.q_strides[2], tile_k(),
               c.k_strides[2], T(0), scratch.scores.get(), STRIDE);
    if (c.mask)
      for (int64_t j = 0; j < keys; j++) scratch.seen[j] = -(c.mask[b * c.keys + begin + j] != 0);
    if (total)
      for (int64_t j = 0; j < keys; j++)
        scratch.to_key[j] = T(std::min(total[start + past] - total[begin + j], 0.0));
  }
};

// The visible keys [low, high) of a row of a tile, and the vectors that hold them.
template <class T> struct Row {
  static constexpr int N = Lanes<T>::N;
  int64_t low, high, from, to, own;  // own: the key at the query's position
  const T* fading;                   // G_t - G_s, or null
  const decltype(Scratch<T>::seen)& seen;
  bool masked;

  Row(const Tile<T>& tile, int64_t i)
      : own(tile.start + i + tile.past - tile.begin), seen(tile.scratch.seen),
        masked(tile.c.mask) {
    const auto& c = tile.c;
    low = c.window ? std::max<int64_t>(0, own - c.window + 1) : 0;
    high = c.causal ? std::min(tile.keys, own + 1) : tile.keys;
    if (low >= high) low = high = 0;
    from = low / N * N;
    to = (high + N - 1) / N * N;
    fading = tile.total ? tile.scratch.fading.get() : nullptr;
    if (!fading) return;
    // Both parts are <= 0, so that their sum in float32 is precise for every key before the block;
    // differences within the block need float64.
    const double now = tile.total[tile.begin + own];
    const T to_row = T(now - tile.total[tile.start + tile.past]);
    const int64_t within = std::clamp(tile.start + tile.past - tile.begin, low, high);
    T* f = tile.scratch.fading.get();
    for (int64_t j = low; j < within; j++) f[j] = to_row + tile.scratch.to_key[j];
    for (int64_t j = within; j < high; j++)
      f[j] = T(std::min(now - tile.total[tile.begin + j], 0.0));
  }

  Int<T> index(int64_t j) const {
    Int<T> index;
    for (int i = 0; i < N; i++) index[i] = i;
    return index + decltype(index[0] + 0)(j);
  }
  Int<T> visible(int64_t j) const {
    using E = typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type;
    const Int<T> here = index(j), shown = (here >= E(low)) & (here < E(high));
    return masked ? shown & *reinterpret_cast<const Int<T>*>(seen.get() + j) : shown;
  }
  void clear(T* x, int64_t keys) const {  // outside the vectors
    std::fill(x, x + from, T(0));
    if (to < keys) std::fill(x + to, x + keys, T(0));
  }
};

// The scores of a row become its weights; returns their sum. Exp is relative to the largest score
// so far: a new one rescales what was summed before it.
template <class T> void weigh(const Tile<T>& tile, int64_t i, T* numerator, T& total, T& largest) {
  using L = Lanes<T>;
  constexpr T NONE = -std::numeric_limits<T>::infinity();
  const Row<T> row(tile, i);
  const auto& c = tile.c;
  T* x = tile.scratch.scores.get() + i * STRIDE;
  const T* coefficients = tile.scratch.coefficients.get();
  const T clamp = T(c.clamp);
  Vec<T> sums = {};
  if (c.shifted) {
    Vec<T> most = Vec<T>{} + NONE;
    for (int64_t j = row.from; j < row.to; j += L::N) {
      Vec<T> score = at_most(at(x + j), clamp);
      if (row.fading) score += at(row.fading + j);
      score = row.visible(j) ? score : Vec<T>{} + NONE;
      most = score > most ? score : most;
      at(x + j) = score;
    }
    T found = NONE;
    for (int n = 0; n < L::N; n++) found = std::max(found, most[n]);
    if (found > largest) {
      const T factor = std::exp(largest - found);
      total *= factor;
      for (int64_t e = 0; e < c.value_width; e++) numerator[e] *= factor;
      largest = found;
    }
    const T shift = largest == NONE ? T(0) : largest;
    for (int64_t j = row.from; j < row.to; j += L::N)
      sums += at(x + j) = exponential<T>(at(x + j) - shift, L::FLOOR);
  } else {
    for (int64_t j = row.from; j < row.to; j += L::N) {
      const Vec<T> score = at_most(at(x + j), clamp);
      Vec<T> weight;
      if (c.terms == 2) {
        weight = score * coefficients[1] + coefficients[0];
      } else if (c.terms) {
        weight = Vec<T>{} + coefficients[c.terms - 1];
        for (int64_t n = c.terms - 2; n >= 0; n--) weight = weight * score + coefficients[n];
      } else {
        weight = exponential<T>(score, L::LOWEST);
      }
      if (row.fading) weight *= exponential<T>(at_most(at(row.fading + j), T(0)), L::FLOOR);
      weight = row.visible(j) ? weight : Vec<T>{};
      sums += weight;
      at(x + j) = weight;
    }
  }
  row.clear(x, tile.keys);
  total += sum<T>(sums);
}

// The scores of a row become its weights times `unit`, the gradients of these those of scores.
// Returns the sum of the gradients of G_t - G_s; that of G_t - G_t = 0 would be mostly rounding.
template <class T> T slopes(const Tile<T>& tile, int64_t i, T dsum, T largest, T unit) {
  using L = Lanes<T>;
  const Row<T> row(tile, i);
  const auto& c = tile.c;
  T *x = tile.scratch.scores.get() + i * STRIDE, *dx = tile.scratch.dweights.get() + i * STRIDE;
  const T* coefficients = tile.scratch.coefficients.get();
  const T clamp = T(c.clamp);
  Vec<T> changes = {};
  for (int64_t j = row.from; j < row.to; j += L::N) {
    const Vec<T> raw = at(x + j), dweight = at(dx + j) + dsum;
    const Int<T> visible = row.visible(j);
    Vec<T> score = at_most(raw, clamp), weight, slope;
    if (c.terms == 2) {  // linear attention: a loop would take longer than the rest
      weight = score * coefficients[1] + coefficients[0];
      slope = Vec<T>{} + coefficients[1];
    } else if (c.terms) {
      weight = Vec<T>{} + coefficients[c.terms - 1];
      slope = Vec<T>{};
      for (int64_t n = c.terms - 2; n >= 0; n--) {
        slope = slope * score + weight;
        weight = weight * score + coefficients[n];
      }
    } else if (c.shifted) {
      if (row.fading) score += at(row.fading + j);
      slope = weight = exponential<T>(at_most(score - largest, T(0)), L::FLOOR);
    } else {
      slope = weight = exponential<T>(score, L::LOWEST);
    }
    if (row.fading && !c.shifted) {
      const Vec<T> factor = exponential<T>(at_most(at(row.fading + j), T(0)), L::FLOOR);
      weight *= factor;
      slope *= factor;
    }
    weight *= unit;
    slope *= unit;
    at(x + j) = visible ? weight : Vec<T>{};
    at(dx + j) = visible & ~(raw > clamp) ? slope * dweight : Vec<T>{};
    if (row.fading) {
      const Int<T> other = row.index(j) != decltype(row.index(j)[0] + 0)(row.own);
      const Vec<T> change = visible & other ? weight * dweight : Vec<T>{};
      changes += change;
      at(tile.scratch.by_key.get() + j) += change;
    }
  }
  row.clear(x, tile.keys);
  row.clear(dx, tile.keys);
  return sum<T>(changes);
}

// What the numerator is divided by: a row whose weights are all 0 has the quotient 0, and one whose
// sum is beyond the range must not have it.
template <class T> T divisor(T total) {
  return total == 0 ? T(1) : std::isinf(total) ? T(NAN) : total;
}

template <class T> bool finite(const T* x, int64_t size) {
  constexpr int64_t N = Lanes<T>::N;
  Vec<T> zeros = {};  // NaN if a number is not finite
  for (int64_t i = 0; i + N <= size; i += N) zeros += load(x + i) * T(0);
  T zero = sum<T>(zeros);
  for (int64_t i = size / N * N; i < size; i++) zero += x[i] * T(0);
  return zero == 0;
}

template <class T> void sums_of_block(Tile<T> tile) {
  const auto& c = tile.c;
  T *numerator = c.numerator + tile.row() * c.value_width, *total = c.weight_sum + tile.row(),
    *largest = c.maximum + tile.row();
  std::fill(numerator, numerator + tile.rows * c.value_width, T(0));
  std::fill(total, total + tile.rows, T(0));
  std::fill(largest, largest + tile.rows, -std::numeric_limits<T>::infinity());
  for (int64_t begin = tile.first; begin < tile.last; begin += KEYS) {
    tile.open(begin);
    for (int64_t i = 0; i < tile.rows; i++)
      weigh(tile, i, numerator + i * c.value_width, total[i], largest[i]);
    product<T>(false, false, tile.rows, c.value_width, tile.keys, T(1), tile.scratch.scores.get(),
               STRIDE, tile.tile_v(), c.v_strides[2], T(1), numerator, c.value_width);
  }
  for (int64_t i = 0; i < tile.rows; i++) {
    if (std::isinf(largest[i]) && largest[i] < 0) largest[i] = 0;
    if (!c.quotient) continue;
    for (int64_t e = 0; e < c.value_width; e++)
      numerator[i * c.value_width + e] /= divisor(total[i]);
  }
  if (c.terms && !(finite(total, tile.rows) && finite(numerator, tile.rows * c.value_width))) {
#pragma omp atomic write
    *c.finite = 0;
  }
}

template <class T> void gradients_of_block(Tile<T> tile, int64_t part) {
  const auto& c = tile.c;
  const int64_t keys = (part * c.batch * c.kv_heads + tile.kv) * c.keys;
  T* dq = c.dq + tile.row() * c.width;
  const T* grad = c.grad + tile.b * c.grad_strides[0] + tile.h * c.grad_strides[1] +
                  tile.start * c.grad_strides[2];
  T *weights = tile.scratch.scores.get(), *dscores = tile.scratch.dweights.get();
  std::fill(dq, dq + tile.rows * c.width, T(0));
  for (int64_t begin = tile.first; begin < tile.last; begin += KEYS) {
    tile.open(begin);
    T *dk = c.dk + (keys + begin) * c.width, *dv = c.dv + (keys + begin) * c.value_width;
    product<T>(false, true, tile.rows, tile.keys, c.value_width, T(1), grad, c.grad_strides[2],
               tile.tile_v(), c.v_strides[2], T(0), dscores, STRIDE);
    if (tile.total) std::fill_n(tile.scratch.by_key.get(), STRIDE, T(0));
    for (int64_t i = 0; i < tile.rows; i++) {
      const int64_t row = tile.row() + i;
      T dsum = c.grad_sum ? c.grad_sum[row] : T(0), unit = 1;
      if (c.quotient) {  // d N = grad / D, d D = -(grad . N / D) / D
        unit = T(1) / divisor(c.weight_sum[row]);
        for (int64_t e = 0; e < c.value_width; e++)
          dsum -= grad[i * c.grad_strides[2] + e] * c.numerator[row * c.value_width + e];
      }
      const T changes = slopes(tile, i, dsum, c.maximum[row], unit);
      if (tile.total) c.by_query[tile.kv * c.queries + tile.start + i] += changes;
    }
    if (tile.total)
      for (int64_t j = 0; j < tile.keys; j++) c.by_key[keys + begin + j] += tile.scratch.by_key[j];
    product<T>(true, false, tile.keys, c.value_width, tile.rows, T(1), weights, STRIDE, grad,
               c.grad_strides[2], T(1), dv, c.value_width);
    product<T>(true, false, tile.keys, c.width, tile.rows, T(c.scale), dscores, STRIDE, tile.q,
               c.q_strides[2], T(1), dk, c.width);
    product<T>(false, false, tile.rows, c.width, tile.keys, T(c.scale), dscores, STRIDE,
               tile.tile_k(), c.k_strides[2], T(1), dq, c.width);
  }
}

template <class T> void sums(const Call<T>& given) {
  const Call<T> c = given.maps ? given.mapped() : given;
  const int64_t blocks = (c.queries + c.block - 1) / c.block, heads = c.batch * c.heads;
  *c.finite = 1;
#pragma omp parallel num_threads(c.threads)
  {
    if (c.maps) {
      each(given.of_queries(), given.q,
           [&](const T* x, int64_t at, int64_t size) { elu1(x, c.mapped_q + at, size); });
      each(given.of_keys(), given.k,
           [&](const T* x, int64_t at, int64_t size) { elu1(x, c.mapped_k + at, size); });
    }
    Scratch<T> scratch(c, false);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < blocks * heads; task++) {
      const int64_t head = task % heads, block = blocks - 1 - task / heads;  // the longest first
      sums_of_block(Tile<T>(c, scratch, head / c.heads, head % c.heads, block));
    }
  }
}

// The gradients of keys sum over blocks, so a task has every `parts`-th block of a key head, and
// gradients of keys of its own.
template <class T> void gradients(const Call<T>& c) {
  const int64_t blocks = (c.queries + c.block - 1) / c.block, group = c.heads / c.kv_heads;
#pragma omp parallel num_threads(c.threads)
  {
    Scratch<T> scratch(c, true);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < c.parts * c.batch * c.kv_heads; task++) {
      const int64_t part = task % c.parts, kv = task / c.parts;
      for (int64_t g = 0; g < group; g++)
        for (int64_t block = part; block < blocks; block += c.parts)
          gradients_of_block(
              Tile<T>(c, scratch, kv / c.kv_heads, kv % c.kv_heads * group + g, block), part);
    }
    if (c.maps) {  // queries and keys are mapped, and contiguous
      each(c.of_queries(), c.q, [&](const T* mapped, int64_t at, int64_t size) {
        elu1_gradient(mapped, c.dq + at, c.dq + at, size);
      });
      for (int64_t part = 0; part < c.parts; part++) {
        T* dk = c.dk + part * c.batch * c.kv_heads * c.keys * c.width;
        each(c.of_keys(), c.k, [&](const T* mapped, int64_t at, int64_t size) {
          elu1_gradient(mapped, dk + at, dk + at, size);
        });
      }
    }
  }
}

}  // namespace

extern "C" {
void sums_float32(const Call<float>* call) { sums(*call); }
void sums_float64(const Call<double>* call) { sums(*call); }
void gradients_float32(const Call<float>* call) { gradients(*call); }
void gradients_float64(const Call<double>* call) { gradients(*call); }
}
