// Sixteen floats at a time: load, store and convert float32, bfloat16 and float16; exp; fixed-order reductions.
//
// Everything that touches a value goes through these functions, tails included (missing lanes are zero), so that a value never
// depends on where in a vector, or in which loop, it was computed. Contraction is off (setup.py): a fused multiply-add happens
// where `fma` is written and nowhere else. Without AVX-512 the same code compiles to what the machine has.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace tp {

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16x32 __attribute__((vector_size(64)));  // sixteen 32-bit integers

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2, e4m3 = 3 };  // e4m3: of keys and values only (e4m3.h)
inline int item_bytes(Dtype t) { return t == Dtype::f32 ? 4 : t == Dtype::e4m3 ? 1 : 2; }

// Calls f with a null pointer of the element type, which is not e4m3.
template <class F>
inline void with_type(Dtype t, F&& f) {
    if (t == Dtype::f32) f(static_cast<float*>(nullptr));
    else if (t == Dtype::bf16) f(static_cast<bf16*>(nullptr));
    else f(static_cast<f16*>(nullptr));
}

inline v16 splat(float x) { return v16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// ---- scalars

inline float as_float(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float to_float(f16 x) {
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, e = (x.bits >> 10) & 31, m = x.bits & 0x3ff;
    if (e == 31) return as_float(sign | 0x7f800000u | (m << 13));
    float magnitude = e ? as_float(((e + 112) << 23) | (m << 13)) : float(m) * 0x1p-24f;
    return as_float(as_bits(magnitude) | sign);
}

inline void from_float(float& y, float x) { y = x; }
inline void from_float(bf16& y, float x) {
    uint32_t b = as_bits(x);
    y.bits = x != x ? uint16_t((b >> 16) | 0x40) : uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
inline void from_float(f16& y, float x) {
    uint32_t b = as_bits(x), sign = (b >> 16) & 0x8000, a = b & 0x7fffffff;
    if (a > 0x7f800000) y.bits = uint16_t(sign | 0x7e00);
    else if (a >= 0x477ff000) y.bits = uint16_t(sign | 0x7c00);
    else if (a < 0x38800000) y.bits = uint16_t(sign | (as_bits(as_float(a) + 0.5f) - as_bits(0.5f)));
    else y.bits = uint16_t(sign | ((a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13));
}

// x after a trip through T.
template <class T>
inline float rounded(float x) { T y; from_float(y, x); return to_float(y); }

// ---- vectors in memory; n < 16 loads n elements and zeros, or stores the first n

inline v16 load(const float* p) { v16 v; memcpy(&v, p, 64); return v; }
inline void store(float* p, v16 v) { memcpy(p, &v, 64); }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
inline v16 load(const bf16* p) {
    return (v16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline v16 load(const f16* p) { return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline __m256i to_bf16(v16 v) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh((__m512)v);
#else
    __m512i b = _mm512_castps_si512((__m512)v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, r, _mm512_set1_epi32(0x7fc0)));
#endif
}
inline __m256i to_f16(v16 v) { return _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void store(bf16* p, v16 v) { _mm256_storeu_si256((__m256i*)p, to_bf16(v)); }
inline void store(f16* p, v16 v) { _mm256_storeu_si256((__m256i*)p, to_f16(v)); }
inline __mmask16 lanes(int n) { return __mmask16((1u << n) - 1); }
inline v16 load(const float* p, int n) { return (v16)_mm512_maskz_loadu_ps(lanes(n), p); }
inline v16 load(const bf16* p, int n) {
    return (v16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(n), p)), 16);
}
inline v16 load(const f16* p, int n) { return (v16)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes(n), p)); }
inline void store(float* p, v16 v, int n) { _mm512_mask_storeu_ps(p, lanes(n), (__m512)v); }
inline void store(bf16* p, v16 v, int n) { _mm256_mask_storeu_epi16(p, lanes(n), to_bf16(v)); }
inline void store(f16* p, v16 v, int n) { _mm256_mask_storeu_epi16(p, lanes(n), to_f16(v)); }
#else
template <class T>
inline v16 load(const T* p) {
    v16 v;
    for (int i = 0; i < 16; ++i) v[i] = to_float(p[i]);
    return v;
}
template <class T>
inline void store(T* p, v16 v) {
    for (int i = 0; i < 16; ++i) from_float(p[i], v[i]);
}
template <class T>
inline v16 load(const T* p, int n) {
    v16 v = splat(0);
    for (int i = 0; i < n; ++i) v[i] = to_float(p[i]);
    return v;
}
template <class T>
inline void store(T* p, v16 v, int n) {
    for (int i = 0; i < n; ++i) from_float(p[i], v[i]);
}
#endif

template <class T>
inline v16 load_some(const T* p, int n) { return n >= 16 ? load(p) : load(p, n); }
template <class T>
inline void store_some(T* p, v16 v, int n) { n >= 16 ? store(p, v) : store(p, v, n); }

// v after a trip through T.
template <class T>
inline v16 rounded(v16 v) { T y[16]; store(y, v); return load(y); }
template <>
inline v16 rounded<float>(v16 v) { return v; }
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
template <>
inline v16 rounded<bf16>(v16 v) { return (v16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(v)), 16); }
template <>
inline v16 rounded<f16>(v16 v) { return (v16)_mm512_cvtph_ps(to_f16(v)); }
#endif

// ---- arithmetic

inline v16 fma(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) || defined(__aarch64__)
    v16 r;
    for (int i = 0; i < 16; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

// Sum and maximum of the lanes, halves first: the same tree everywhere.
inline float sum(v16 v) {
    float a[16];
    store(a, v);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) a[i] += a[i + half];
    return a[0];
}
inline float largest(v16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < 16; ++i) m = v[i] > m ? v[i] : m;
    return m;
#endif
}
inline v16 larger(v16 a, v16 b) { return a > b ? a : b; }

// e^x within 2 units in the last place; exactly 0 below -87.3; capped at e^88; NaN stays NaN.
inline v16 exp(v16 x) {
    const v16 low = splat(-87.3f), high = splat(88.0f);
    v16 y = x > high ? high : x;
    y = y < low ? low : y;
    const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer kept in the low mantissa bits
    v16 shifted = fma(y, splat(1.44269504088896341f), magic);
    v16 n = shifted - magic;
    v16 r = fma(n, splat(-0.693359375f), y);
    r = fma(n, splat(2.12194440e-4f), r);
    v16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    i16x32 power = (((i16x32)shifted) << 23) + 0x3f800000;
    v16 result = p * (v16)power;
    return x < low ? splat(0) : result;
}
inline v16 sigmoid(v16 x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }
inline v16 silu(v16 x) { return x / (splat(1.0f) + exp(-x)); }

// Exchange of lane blocks of W between two rows, the step that transposes: `low` keeps a's lanes without bit W and puts b's there
// beside them; `high` is what is left. The masks are constants, not computed.
template <int W>
constexpr int32_t low_lane(int i) { return i & W ? 16 + i - W : i; }
template <int W>
constexpr int32_t high_lane(int i) { return i & W ? 16 + i : i + W; }
// The sixteen lanes of a constant mask, from a constexpr function of the lane.
#define TP_LANES(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
template <int W>
inline v16 low(v16 a, v16 b) { return __builtin_shuffle(a, b, i16x32{TP_LANES(low_lane<W>)}); }
template <int W>
inline v16 high(v16 a, v16 b) { return __builtin_shuffle(a, b, i16x32{TP_LANES(high_lane<W>)}); }

// Rows become columns: sixteen vectors as a 16 x 16 matrix.
template <int W = 8>
inline void transpose(v16 (&m)[16]) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
        if (!(i & W)) {
            v16 a = m[i], b = m[i + W];
            m[i] = low<W>(a, b);
            m[i + W] = high<W>(a, b);
        }
    if constexpr (W > 1) transpose<W / 2>(m);
}

// Lane r of the result is the sum of row r, halves first. m is used up.
template <int W = 8>
inline v16 row_sums(v16 (&m)[16]) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) m[i] = low<W>(m[i], m[i + W]) + high<W>(m[i], m[i + W]);
    if constexpr (W > 1) return row_sums<W / 2>(m);
    return m[0];
}

}  // namespace tp
