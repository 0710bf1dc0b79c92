#include "norm.h"

#include <algorithm>

#include "api.h"
#include "tape.h"
#include "parallel.h"

namespace quire {
namespace {

constexpr double NORM_NS = 0.06;  // an element of a row in L2

template <class T>
void normalise(const T* x, const T* weight, int64_t size, float eps, T* out) {
  const vf scale = splat(rms_scale(x, size, eps));
  int64_t i = 0;
  for (; i + W <= size; i += W) store(out + i, scaled<T>(load(x + i), scale, load(weight + i)));
  if (i < size) {
    const int n = static_cast<int>(size - i);
    store_part(out + i, scaled<T>(load_part(x + i, n), scale, load_part(weight + i, n)), n);
  }
}

template <class T>
void add(const T* x, T* residual, int64_t size) {
  int64_t i = 0;
  for (; i + W <= size; i += W) store(residual + i, load(residual + i) + load(x + i));
  if (i < size) {
    const int n = static_cast<int>(size - i);
    store_part(residual + i, load_part(residual + i, n) + load_part(x + i, n), n);
  }
}

template <class T>
void normalise_rows(int64_t rows, int64_t size, float eps, const T* x, T* residual, const T* weight, T* out) {
  const double nanoseconds = NORM_NS * rows * size * (residual ? 2 : 1);
  parallel_for(rows, grain_for(rows, nanoseconds), nanoseconds, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      if (residual) add(x + row * size, residual + row * size, size);
      normalise((residual ? residual : x) + row * size, weight, size, eps, out + row * size);
    }
  });
}

}  // namespace
}  // namespace quire

using namespace quire;

// x [rows, size], weight [size], out [rows, size]. residual, if not null, is incremented by x first and then normalized.
QUIRE_API void quire_rms_norm(int64_t dtype, int64_t rows, int64_t size, double eps, const void* x, void* residual,
                              const void* weight, void* out) {
  if (dtype == FLOAT32)
    normalise_rows(rows, size, float(eps), (const float*)x, (float*)residual, (const float*)weight, (float*)out);
  else
    normalise_rows(rows, size, float(eps), (const bf16*)x, (bf16*)residual, (const bf16*)weight, (bf16*)out);
}

QUIRE_RECORDABLE(rms_norm);
