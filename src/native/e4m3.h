// The 8-bit float of KV pages, e4m3: sign, four bits of exponent (bias 7), three of mantissa; no infinities, 0x7f and 0xff are NaN.
//
// Keys and values only: weights, activations and states never have this type. Every code is exact in float32 and in bfloat16.
// Storing rounds to nearest, ties to even, and saturates: beyond 448, the largest number, infinities included, it keeps +-448, where a
// plain cast may give NaN or not, depending on the device (models/attention/cache.py has the rule for torch). NaN stays NaN.
#pragma once
#include "vec.h"

namespace tp {

struct e4m3 { uint8_t bits; };

// Calls f with a null pointer of the element type of keys and values.
template <class F>
inline void with_kv_type(Dtype t, F&& f) {
    if (t == Dtype::e4m3) f(static_cast<e4m3*>(nullptr));
    else with_type(t, f);
}

// ---- scalars

inline float to_float(e4m3 x) {
    uint32_t sign = uint32_t(x.bits & 0x80) << 24, m = x.bits & 0x7f;
    if (m == 0x7f) return as_float(sign | 0x7fc00000u);
    return as_float(sign | (m < 8 ? as_bits(float(m) * 0x1p-9f) : (m << 20) + (120u << 23)));
}
inline void from_float(e4m3& y, float x) {
    uint32_t b = as_bits(x), sign = (b >> 24) & 0x80, a = b & 0x7fffffff;
    if (a > 0x7f800000) y.bits = uint8_t(sign | 0x7f);
    else if (a >= 0x43e00000) y.bits = uint8_t(sign | 0x7e);                                     // 448 and more
    else if (a < 0x3c800000) y.bits = uint8_t(sign | (as_bits(as_float(a) + 0x1p14f) - as_bits(0x1p14f)));  // multiples of 2^-9
    else y.bits = uint8_t(sign | ((a - (120u << 23) + 0x7ffff + ((a >> 20) & 1)) >> 20));
}

// ---- vectors: the same, a code in each 32-bit lane

inline v16 decode(i16x32 code) {
    i16x32 m = code & 0x7f, sign = (code & 0x80) << 24;
    v16 small = __builtin_convertvector(m, v16) * splat(0x1p-9f);
    i16x32 bits = m < 8 ? (i16x32)small : (m << 20) + (120 << 23);
    bits = m == 0x7f ? i16x32{} + 0x7fc00000 : bits;
    return (v16)(bits | sign);
}
inline i16x32 encode(v16 x) {
    i16x32 b = (i16x32)x, sign = (b >> 24) & 0x80, a = b & 0x7fffffff;
    i16x32 small = (i16x32)((v16)a + splat(0x1p14f)) - (i16x32)splat(0x1p14f);
    i16x32 code = a < 0x3c800000 ? small : (a - (120 << 23) + 0x7ffff + ((a >> 20) & 1)) >> 20;
    code = a >= 0x43e00000 ? i16x32{} + 0x7e : code;
    code = a > 0x7f800000 ? i16x32{} + 0x7f : code;
    return code | sign;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
inline v16 load(const e4m3* p) { return decode((i16x32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline v16 load(const e4m3* p, int n) { return decode((i16x32)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes(n), p))); }
inline void store(e4m3* p, v16 v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)encode(v))); }
inline void store(e4m3* p, v16 v, int n) { _mm512_mask_cvtepi32_storeu_epi8(p, lanes(n), (__m512i)encode(v)); }
#endif

// ---- as bfloat16

// Four codes a lane become two pairs of bfloat16 a lane: of the first two codes, and of the last two.
struct Pairs { v16 first, second; };
#if defined(__AVX512BW__)
// The two bytes of a bfloat16, by code without its sign.
struct PairTables {
    alignas(64) uint8_t low[128], high[128];
    PairTables() {
        for (int i = 0; i < 128; ++i) {
            uint32_t bits = as_bits(to_float(e4m3{uint8_t(i)}));
            low[i] = uint8_t(bits >> 16);
            high[i] = uint8_t(bits >> 24);
        }
    }
};
inline const PairTables pair_tables;
inline Pairs pairs(v16 codes) {
    __m512i x = (__m512i)codes;
#if defined(__AVX512VBMI__)
    auto looked_up = [&](const uint8_t* t) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(t), x, _mm512_load_si512(t + 64));
    };
    __m512i low = looked_up(pair_tables.low), high = looked_up(pair_tables.high);
#else
    // A look-up reaches sixteen entries: enough for what is subnormal. The rest are bits moved, but for NaN.
    auto all = [](int byte) { return _mm512_set1_epi8(char(byte)); };
    __m512i m = _mm512_and_si512(x, all(0x7f));
    __mmask64 small = _mm512_cmplt_epu8_mask(m, all(8)), nan = _mm512_cmpeq_epi8_mask(m, all(0x7f));
    auto finished = [&](__m512i bits, const uint8_t* t) {
        __m512i first = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)t));
        return _mm512_mask_mov_epi8(_mm512_mask_shuffle_epi8(bits, small, first, m), nan, all(t[127]));
    };
    __m512i low = finished(_mm512_and_si512(_mm512_slli_epi16(x, 4), all(0xf0)), pair_tables.low);
    __m512i exponent = _mm512_and_si512(_mm512_srli_epi16(x, 4), all(7));
    __m512i high = finished(_mm512_add_epi8(exponent, all(0x3c)), pair_tables.high);
#endif
    high = _mm512_ternarylogic_epi64(high, x, _mm512_set1_epi8(char(0x80)), 0xf8);  // a | (b & c)
    __m512i near = _mm512_unpacklo_epi8(low, high), far = _mm512_unpackhi_epi8(low, high);
    return {(v16)_mm512_shuffle_ps((__m512)near, (__m512)far, 0x88), (v16)_mm512_shuffle_ps((__m512)near, (__m512)far, 0xdd)};
}
#else
inline Pairs pairs(v16 codes) {
    i16x32 x = (i16x32)codes;
    auto pair = [](i16x32 a, i16x32 b) {
        i16x32 low = ((i16x32)decode(a & 0xff) >> 16) & 0xffff, high = (i16x32)decode(b & 0xff) & int32_t(0xffff0000);
        return (v16)(low | high);
    };
    return {pair(x, x >> 8), pair(x >> 16, x >> 24)};
}
#endif

}  // namespace tp
