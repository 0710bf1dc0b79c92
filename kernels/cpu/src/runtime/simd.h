// One vector of floats of the width the build is for, and the few operations that the kernels need on it.
//
// GCC/Clang vector extensions carry the arithmetic, so this compiles for any CPU; intrinsics stand only where the
// extensions lack operations (fused multiply-add, dot products of bfloat16 pairs, narrowing). The build turns contraction
// off (-ffp-contract=off): a product and a sum fuse where fma() is written and nowhere else, which is what keeps a
// row's bits the same in every tile shape.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// (Loops over arrays of vectors are unrolled by pragma throughout: only then are the arrays registers.)
#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define QUIRE_AVX512 1
constexpr int W = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__)
#define QUIRE_AVX2 1
constexpr int W = 8;
constexpr int REGISTERS = 16;
#else
constexpr int W = 4;
#if defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
#endif

#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)
#define QUIRE_BF16_DOT 1  // vdpbf16ps: two bfloat16 products a lane and instruction
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 {
  uint16_t bits;
};

template <class T>
inline constexpr bool is_bf16 = false;
template <>
inline constexpr bool is_bf16<bf16> = true;

template <class To, class From>
QUIRE_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

QUIRE_INLINE vf splat(float x) {
#if defined(QUIRE_AVX512)
  return (vf)_mm512_set1_ps(x);
#else
  return vf{} + x;
#endif
}
QUIRE_INLINE vi splat_int(int32_t x) { return vi{} + x; }
QUIRE_INLINE vu splat_word(uint32_t x) { return vu{} + x; }

QUIRE_INLINE vi lane_ids() {
  vi ids;
  for (int i = 0; i < W; i++) ids[i] = i;
  return ids;
}

QUIRE_INLINE vf fma(vf a, vf b, vf c) {
#if defined(QUIRE_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(QUIRE_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// max and min give b where either is NaN.
QUIRE_INLINE vf max(vf a, vf b) {
#if defined(QUIRE_AVX512)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

QUIRE_INLINE vf min(vf a, vf b) {
#if defined(QUIRE_AVX512)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

// ---- float32 and bfloat16 in memory ----

QUIRE_INLINE float to_float(float x) { return x; }
QUIRE_INLINE float to_float(bf16 x) { return bits_as<float>((uint32_t)x.bits << 16); }

QUIRE_INLINE vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
QUIRE_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }

QUIRE_INLINE vf widen(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }

QUIRE_INLINE vh narrow(vf v) {  // to nearest, ties to even; NaN stays NaN
#if defined(QUIRE_BF16_DOT)
  return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
  vu u = (vu)v;
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  vu nan = (u >> 16) | 0x40u;
  return __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded, vh);
#endif
}

QUIRE_INLINE vf load(const bf16* p) {
  vh h;
  std::memcpy(&h, p, sizeof(h));
  return widen(h);
}
QUIRE_INLINE void store(bf16* p, vf v) {
  vh h = narrow(v);
  std::memcpy(p, &h, sizeof(h));
}

// The first n lanes (0 < n <= W); the others read as zero and are not written.
template <class T>
QUIRE_INLINE vf load_part(const T* p, int n) {
  if (n == W) return load(p);
  T lanes[W] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}
template <class T>
QUIRE_INLINE void store_part(T* p, vf v, int n) {
  if (n == W) return store(p, v);
  T lanes[W];
  store(lanes, v);
  std::memcpy(p, lanes, n * sizeof(T));
}

// bfloat16 bits in the low half of each lane; past `n` zero.
QUIRE_INLINE vu widen_bits(const bf16* p, int n) {
  vh h = {};
  std::memcpy(&h, p, n == W ? sizeof(h) : n * sizeof(bf16));
  return __builtin_convertvector(h, vu);
}

// Rounds a value to type T and back.
template <class T>
QUIRE_INLINE vf rounded_to(vf v) {
  if constexpr (is_bf16<T>)
    return widen(narrow(v));
  else
    return v;
}

QUIRE_INLINE vf absolute(vf v) { return (vf)((vi)v & 0x7fffffff); }

// floor(log2(x)) of normal positive x.
QUIRE_INLINE vf exponent_of(vf x) {
#if defined(QUIRE_AVX512)
  return (vf)_mm512_getexp_ps((__m512)x);
#else
  return __builtin_convertvector(((vi)x >> 23) - 127, vf);
#endif
}

// ---- across lanes: always the same tree, so always the same bits ----

QUIRE_INLINE float sum_lanes(vf v) {
#if defined(QUIRE_AVX512)
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float x[W];
  store(x, v);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
#endif
}

QUIRE_INLINE float max_lanes(vf v) {
#if defined(QUIRE_AVX512)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float x[W];
  store(x, v);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
#endif
}

QUIRE_INLINE bool any(vi mask) {
#if defined(QUIRE_AVX512)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  int32_t seen = 0;
  for (int i = 0; i < W; i++) seen |= mask[i];
  return seen != 0;
#endif
}

// ---- exponential and logarithm ----
// Polynomials: minimax fits by reweighted least squares; errors are the largest seen against float64 (test_simd.py).

// p * 2^n for p in [0.5, 2] and n an integer in [-200, 200].
QUIRE_INLINE vf scale_exponent(vf p, vf n) {
#if defined(QUIRE_AVX512)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  vi whole = __builtin_convertvector(n, vi);
  vi half = whole >> 1;  // in two steps: 2^128 is no float, and neither is 2^-150
  return p * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
#endif
}

// 2^(n + f) for f in [-0.5, 0.5].
QUIRE_INLINE vf exp2_split(vf n, vf f) {
  vf p = splat(0.0001535336f);
  p = fma(p, f, splat(0.0013398875f));
  p = fma(p, f, splat(0.009618437f));
  p = fma(p, f, splat(0.055503324f));
  p = fma(p, f, splat(0.24022648f));
  p = fma(p, f, splat(0.6931472f));
  p = fma(p, f, splat(1.0f));
  return scale_exponent(p, n);
}

QUIRE_INLINE vf round_to_integer(vf x) {  // |x| < 2^22, ties to even
#if defined(QUIRE_AVX512)
  return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: no bits are left under the point
  return (x + magic) - magic;
#endif
}

// 2^x: 0 under -150, inf over 128, NaN for NaN. Within 1 ulp.
QUIRE_INLINE vf exp2(vf x) {
  vf clamped = min(splat(129.0f), max(splat(-160.0f), x));
  vf n = round_to_integer(clamped);
  return exp2_split(n, clamped - n);
}

// 2^x for x <= 0, for results rounded to bfloat16: relative error under 3e-6; 0 under -150, NaN for NaN.
QUIRE_INLINE vf exp2_coarse(vf x) {
  vf clamped = max(splat(-160.0f), x);
  vf n = round_to_integer(clamped);
  vf f = clamped - n;
  vf p = splat(0.009582851f);
  p = fma(p, f, splat(0.05590643f));
  p = fma(p, f, splat(0.24024099f));
  p = fma(p, f, splat(0.6931242f));
  p = fma(p, f, splat(1.0f));
  return scale_exponent(p, n);
}

// e^x: 0 under -104, inf over 88.73, NaN for NaN. Within 2 ulp.
QUIRE_INLINE vf exp(vf x) {
  vf clamped = min(splat(89.4f), max(splat(-110.0f), x));
  const vf log2e = splat(1.442695f);
  vf n = round_to_integer(clamped * log2e);
  vf rest = fma(n, splat(-0.693359375f), clamped);  // exact: 0.693359375 has 10 bits
  rest = fma(n, splat(2.12194440e-4f), rest);       // log(2) = 0.693359375 - 2.12194440e-4
  return exp2_split(n, rest * log2e);
}

// log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1].
QUIRE_INLINE vf log1p_reduced(vf f) {
  vf p = splat(-0.076344505f);
  p = fma(p, f, splat(0.12761582f));
  p = fma(p, f, splat(-0.13160202f));
  p = fma(p, f, splat(0.14201759f));
  p = fma(p, f, splat(-0.16623355f));
  p = fma(p, f, splat(0.20001227f));
  p = fma(p, f, splat(-0.25000823f));
  p = fma(p, f, splat(0.3333333f));
  vf square = f * f;
  return fma(square, fma(f, p, splat(-0.5f)), f);
}

// log(x) of normal positive x. Within 1 ulp, near 1 as well.
QUIRE_INLINE vf log(vf x) {
  vi bits = (vi)x;
  vi exponent = (bits - 0x3f3504f3) >> 23;  // x = m * 2^exponent, m in [sqrt(1/2), sqrt(2))
  vf m = (vf)(bits - (exponent << 23));
  vf n = __builtin_convertvector(exponent, vf);
  vf fraction = fma(n, splat(-2.12194440e-4f), log1p_reduced(m - 1.0f));
  return fma(n, splat(0.693359375f), fraction);
}

}  // namespace quire
