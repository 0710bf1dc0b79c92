// Root mean square normalization of one row (kernels/reference/rms_norm.py).
#pragma once

#include <cmath>

#include "simd.h"

namespace quire {

// 1 / sqrt(mean of squares + eps). Four sums by position keep the adds apart; their order depends on `size` alone.
template <class T>
QUIRE_INLINE float rms_scale(const T* x, int64_t size, float eps) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= size; i += 4 * W)
    for (int part = 0; part < 4; part++) {
      const vf v = load(x + i + part * W);
      sums[part] = fma(v, v, sums[part]);
    }
  for (int part = 0; i < size; i += W, part++) {
    const vf v = load_part(x + i, static_cast<int>(size - i < W ? size - i : W));
    sums[part] = fma(v, v, sums[part]);
  }
  const float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

// Rounds to T before the weight and after it, as the reference does.
template <class T>
QUIRE_INLINE vf scaled(vf x, vf scale, vf weight) {
  return rounded_to<T>(x * scale) * weight;
}

}  // namespace quire
