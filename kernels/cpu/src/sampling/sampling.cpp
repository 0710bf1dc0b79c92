// Sampling (kernels/reference/sampling/sampling.py). Filters reduce to one number, the least logit that is kept: found
// by selection among few candidates, never by sorting a whole row.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "api.h"
#include "tape.h"
#include "noise.h"
#include "parallel.h"

namespace quire {
namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr int GROUP = 4 * W;        // logits compared at once
constexpr int BINS = 2048;          // bins of probability mass by distance from the likeliest token, for top-p
constexpr double GREEDY_NS = 0.05;  // per logit in L2
constexpr double NOISY_NS = 0.25;

vf lanes_or_none(const float* row, int64_t at, int64_t size) {
  if (at + W <= size) return load(row + at);
  float lanes[W];
  std::fill(lanes, lanes + W, NONE);
  std::copy(row + at, row + size, lanes);
  return load(lanes);
}

// ---- greedy ----

struct Best {
  float value;
  int64_t token;  // the lowest of equals
  bool lost;      // NaN, +inf or nothing but -inf
};

Best best_of(const float* row, int64_t size) {
  vf best = splat(NONE);
  vi group = {}, nan = {};
  const auto visit = [&](vf a, vf b, vf c, vf d, int64_t at) {
    nan |= (a != a) | (b != b) | (c != c) | (d != d);
    const vf top = max(max(a, b), max(c, d));
    group = top > best ? splat_int(static_cast<int32_t>(at / GROUP)) : group;
    best = max(best, top);
  };
  int64_t at = 0;
  for (; at + GROUP <= size; at += GROUP)
    visit(load(row + at), load(row + at + W), load(row + at + 2 * W), load(row + at + 3 * W), at);
  if (at < size) {
    vf last[4];
    for (int i = 0; i < 4; i++) last[i] = at + i * W < size ? lanes_or_none(row, at + i * W, size) : splat(NONE);
    visit(last[0], last[1], last[2], last[3], at);
  }
  const float value = max_lanes(best);
  if (any(nan) || !std::isfinite(value)) return {value, -1, true};
  int32_t first = std::numeric_limits<int32_t>::max();
  for (int i = 0; i < W; i++)
    if (best[i] == value) first = std::min(first, group[i]);
  int64_t token = int64_t(first) * GROUP;
  while (row[token] != value) token++;
  return {value, token, false};
}

// ---- filters ----

// Appends values of at least `least` to `out`; returns their number.
int64_t gather_from(const float* row, int64_t size, float least, float* out) {
  int64_t count = 0;
  int64_t at = 0;
  for (; at + W <= size; at += W) {
    const vf v = load(row + at);
    const vi keep = v >= splat(least);
#if defined(QUIRE_AVX512)
    const __mmask16 mask = _mm512_movepi32_mask((__m512i)keep);
    if (!mask) continue;
    _mm512_mask_compressstoreu_ps(out + count, mask, (__m512)v);
    count += __builtin_popcount(mask);
#else
    if (!any(keep)) continue;
    for (int i = 0; i < W; i++)
      if (keep[i]) out[count++] = v[i];
#endif
  }
  for (; at < size; at++)
    if (row[at] >= least) out[count++] = row[at];
  return count;
}

// The k-th largest, 0 < k < size. The k-th largest of the maxima of groups is no larger: values from it on are gathered,
// and contain the answer. `room` holds `size` floats.
float kth_largest(const float* row, int64_t size, int64_t k, float* room) {
  const int64_t vectors = size / W;
  const int64_t per_group = std::max<int64_t>(1, vectors / std::max<int64_t>(16, 4 * k / W + 1));
  int64_t maxima = 0;
  for (int64_t v = 0; v < vectors; v += per_group, maxima += W) {
    vf top = load(row + v * W);
    for (int64_t i = v + 1; i < std::min(v + per_group, vectors); i++) top = max(top, load(row + i * W));
    store(room + maxima, top);
  }
  float least = NONE;
  if (maxima >= k) {
    std::nth_element(room, room + k - 1, room + maxima, std::greater<float>());
    least = room[k - 1];
  }
  const int64_t count = gather_from(row, size, least, room);
  std::nth_element(room, room + k - 1, room + count, std::greater<float>());
  return room[k - 1];
}

// The least logit of the nucleus among those >= least. Probability mass goes into bins by distance from `top`; only the
// bin where the mass reaches top_p is sorted.
class Nucleus {
 public:
  Nucleus(const float* row, int64_t size, float top, float least, float top_p, float* room)
      : row_(row), size_(size), top_(top), least_(least), room_(room) {
    const double total = mass();
    wanted_ = double(top_p) * total;
    // Logits farther from the top than this together weigh less than 1 - top_p of the whole: none is kept.
    const double range = std::log(double(size) / std::max((1.0 - double(top_p)) * total, 1e-12));
    bins_per_nat_ = static_cast<float>(BINS / std::max(range, 1.0));
    least_ = std::max(least_, static_cast<float>(top - std::max(range, 1.0)));
    fill();
  }

  float cutoff() {
    double before = 0;
    float cutoff = top_;
    int bin = 0;
    while (bin < BINS - 1 && before + mass_[bin] < wanted_) before += mass_[bin++];
    for (; bin < BINS; bin++) {
      if (mass_[bin] == 0) continue;  // empty, and sorting it would take a pass over the row
      const int64_t count = gather(bin);
      std::sort(room_, room_ + count, std::greater<float>());
      for (int64_t i = 0; i < count; i++) {
        cutoff = room_[i];
        before += exp(splat(cutoff - top_))[0];
        if (before >= wanted_) return cutoff;
      }
    }
    return cutoff;
  }

 private:
  vi bin_of(vf v) const {
    const vf bins = (splat(top_) - v) * splat(bins_per_nat_);
    return __builtin_convertvector(min(max(bins, vf{}), splat(BINS - 1)), vi);
  }

  // Over logits >= least, which is above -inf from here on.
  template <class Visit>
  QUIRE_INLINE void each(const Visit& visit) const {
    const vf least = splat(std::max(least_, -std::numeric_limits<float>::max()));
    for (int64_t at = 0; at < size_; at += W) {
      const vf v = lanes_or_none(row_, at, size_);
      const vi kept = v >= least;
      if (any(kept)) visit(v, kept);
    }
  }

  // Weight relative to the top's.
  double mass() const {
    vf sum = {};
    each([&](vf v, vi kept) { sum += kept ? exp(v - splat(top_)) : vf{}; });
    return sum_lanes(sum);
  }

  void fill() {
    std::fill(mass_, mass_ + BINS, 0.0f);
    each([&](vf v, vi kept) {
      const vf weight = exp(v - splat(top_));
      const vi bin = bin_of(v);
      for (int i = 0; i < W; i++)
        if (kept[i]) mass_[bin[i]] += weight[i];
    });
  }

  int64_t gather(int bin) {
    int64_t count = 0;
    each([&](vf v, vi kept) {
      const vi here = kept & (bin_of(v) == bin);
      if (!any(here)) return;
      for (int i = 0; i < W; i++)
        if (here[i]) room_[count++] = v[i];
    });
    return count;
  }

  const float* row_;
  const int64_t size_;
  const float top_;
  float least_;
  float* room_;
  float bins_per_nat_;
  float mass_[BINS];
  double wanted_;
};

// ---- sampling ----

struct Filters {
  int32_t top_k;
  float top_p, min_p;
};

// row: logits over temperature; top: the largest.
float least_kept(const float* row, int64_t size, float top, const Filters& filters) {
  float least = filters.min_p > 0 ? top + std::log(filters.min_p) : NONE;
  float* room = static_cast<float*>(scratch(0, (size + W) * sizeof(float)));
  if (filters.top_k > 0 && filters.top_k < size) least = std::max(least, kth_largest(row, size, filters.top_k, room));
  if (filters.top_p < 1) least = std::max(least, Nucleus(row, size, top, least, filters.top_p, room).cutoff());
  return least;
}

// argmax of row / temperature + noise over logits of at least `least`; the lowest id among equals.
//
// Noise is at most -log(v), v uniform, so a token with floor(log2(v)) >= (logit / temperature - best so far) * log2(e)
// cannot win: that takes no logarithm and excludes all but a few dozen tokens of a row.
int64_t noisy_best(const float* row, int64_t size, float temperature, float least, const NoiseKeys& keys) {
  vf best = splat(NONE), leader = splat(NONE);
  vi token = {};
  const vf divisor = splat(temperature), inverse = splat(1.0f / temperature);
  for (int64_t at = 0; at < size; at += W) {
    const vf logits = lanes_or_none(row, at, size);
    if (least > NONE && !any(logits >= splat(least))) continue;  // filtered rows have been divided already
    const vi ids = lane_ids() + static_cast<int32_t>(at);
    const vf v = uniform_of(keys, (vu)ids);
    const vf nearly = logits * inverse;  // the slack covers its rounding and that of noise
    const vf slack = fma(absolute(nearly), splat(4e-7f), splat(1e-2f));
    if (!any(exponent_of(v) < (nearly - leader) * 1.442695f + slack)) continue;
    const vf scaled = logits / divisor;
    const vf noisy = scaled >= splat(least) ? scaled + gumbel_of(v) : splat(NONE);
    token = noisy > best ? ids : token;
    best = max(best, noisy);
    leader = splat(max_lanes(best));
  }
  const float value = leader[0];
  int32_t chosen = std::numeric_limits<int32_t>::max();
  for (int i = 0; i < W; i++)
    if (best[i] == value) chosen = std::min(chosen, token[i]);
  return chosen;
}

int64_t sample_row(float* row, int64_t size, float temperature, const Filters& filters, const NoiseKeys& keys) {
  const Best best = best_of(row, size);
  if (best.lost || temperature == 0) return best.token;
  if (filters.top_k <= 0 && filters.top_p >= 1 && filters.min_p <= 0)
    return noisy_best(row, size, temperature, NONE, keys);
  int64_t at = 0;
  for (; at + W <= size; at += W) store(row + at, load(row + at) / splat(temperature));
  for (; at < size; at++) row[at] /= temperature;
  return noisy_best(row, size, 1.0f, least_kept(row, size, best.value / temperature, filters), keys);
}

}  // namespace
}  // namespace quire

using namespace quire;

// Shapes as in kernels/reference/sampling/sampling.py; temperature, top_k, top_p and min_p may each be null.
QUIRE_API void quire_sample(int64_t rows, int64_t size, float* logits, const float* temperature, const int32_t* top_k,
                            const float* top_p, const float* min_p, const int64_t* seeds, const int32_t* positions,
                            int32_t* out) {
  const double nanoseconds = rows * size * (temperature ? NOISY_NS : GREEDY_NS);
  parallel_for(rows, grain_for(rows, nanoseconds), nanoseconds, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Filters filters{top_k ? top_k[i] : 0, top_p ? top_p[i] : 1.0f, min_p ? min_p[i] : 0.0f};
      const float heat = temperature ? temperature[i] : 0.0f;
      out[i] =
          static_cast<int32_t>(sample_row(logits + i * size, size, heat, filters, NoiseKeys(seeds[i], positions[i])));
    }
  });
}

QUIRE_RECORDABLE(sample);
