#include <algorithm>

#include "api.h"
#include "tape.h"
#include "parallel.h"
#include "simd.h"

namespace quire {
namespace {

constexpr double SILU_NS = 0.12;  // per element in L2

template <class T>
QUIRE_INLINE vf gated(vf gate, vf up) {  // rounds to T after silu, as the reference does
  return rounded_to<T>(gate / (1.0f + exp(-gate))) * up;
}

template <class T>
void silu_mul(int64_t rows, int64_t size, const T* gate_up, T* out) {
  const double nanoseconds = SILU_NS * rows * size;
  parallel_for(rows, grain_for(rows, nanoseconds), nanoseconds, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *gate = gate_up + row * 2 * size, *up = gate + size;
      T* to = out + row * size;
      int64_t i = 0;
      for (; i + W <= size; i += W) store(to + i, gated<T>(load(gate + i), load(up + i)));
      if (i < size) {
        const int n = static_cast<int>(size - i);
        store_part(to + i, gated<T>(load_part(gate + i, n), load_part(up + i, n)), n);
      }
    }
  });
}

}  // namespace
}  // namespace quire

using namespace quire;

// gate_up [rows, 2 * size] -> out [rows, size]
QUIRE_API void quire_silu_mul(int64_t dtype, int64_t rows, int64_t size, const void* gate_up, void* out) {
  if (dtype == FLOAT32)
    silu_mul(rows, size, (const float*)gate_up, (float*)out);
  else
    silu_mul(rows, size, (const bf16*)gate_up, (bf16*)out);
}

QUIRE_RECORDABLE(silu_mul);
