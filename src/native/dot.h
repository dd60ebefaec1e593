// The one matrix product: MR rows of A times NR strips of sixteen columns of B, one accumulator per output element, terms added
// in ascending k. Every caller (linear layers, attention scores, attention values) and every MR, NR give each output element the
// same sequence of operations: that is what makes results independent of the batch.
//
// A: rows of `lda` elements. B: strips of [steps][16][STEP] elements, `strip` elements apart; step s covers k = s * STEP ...
// Missing k and columns are zeros in B, and A is readable up to steps * STEP.
#pragma once
#include <cstddef>

#include "vec.h"

namespace tp {

// bfloat16 x bfloat16 -> float32, two terms a step.
struct DotBf16 {
    using A = bf16;
    using B = bf16;
    static constexpr int STEP = 2;
#if defined(__AVX512BF16__)
    using Vb = __m512i;
    using Va = __m512i;
    static Vb load_b(const bf16* p) { return _mm512_loadu_si512(p); }
    static Va load_a(const bf16* p) {
        int32_t pair;
        memcpy(&pair, p, 4);
        return _mm512_set1_epi32(pair);
    }
    static v16 mac(v16 acc, Va a, Vb b) { return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
#else
    struct Vb { v16 even, odd; };
    struct Va { float even, odd; };
    static Vb load_b(const bf16* p) {
        i16x32 pairs;
        memcpy(&pairs, p, 64);
        return {(v16)(pairs << 16), (v16)(pairs & int32_t(0xffff0000))};
    }
    static Va load_a(const bf16* p) { return {to_float(p[0]), to_float(p[1])}; }
    static v16 mac(v16 acc, Va a, Vb b) { return fma(splat(a.odd), b.odd, fma(splat(a.even), b.even, acc)); }
#endif
};

// float32 A; B is float32 or float16.
template <class T>
struct DotWide {
    using A = float;
    using B = T;
    static constexpr int STEP = 1;
    using Vb = v16;
    using Va = v16;
    static Vb load_b(const T* p) { return load(p); }
    static Va load_a(const float* p) { return splat(*p); }
    static v16 mac(v16 acc, Va a, Vb b) { return fma(a, b, acc); }
};
using DotF32 = DotWide<float>;
using DotF16 = DotWide<f16>;

// acc[i][j] += A row i . B strip j.  AHEAD: bytes of B to prefetch, for weights that come from memory.
template <class D, int MR, int NR, int AHEAD = 0>
inline void multiply(const typename D::A* a, ptrdiff_t lda, const typename D::B* b, ptrdiff_t strip, int steps,
                     v16 (&acc)[MR][NR]) {
    v16 c[MR][NR];
#pragma GCC unroll 32
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 32
        for (int j = 0; j < NR; ++j) c[i][j] = acc[i][j];
    for (int s = 0; s < steps; ++s) {
        typename D::Vb bv[NR];
#pragma GCC unroll 32
        for (int j = 0; j < NR; ++j) {
            const typename D::B* p = b + j * strip + ptrdiff_t(s) * 16 * D::STEP;
            bv[j] = D::load_b(p);
            if (AHEAD) __builtin_prefetch(reinterpret_cast<const char*>(p) + AHEAD);
        }
#pragma GCC unroll 32
        for (int i = 0; i < MR; ++i) {
            typename D::Va av = D::load_a(a + i * lda + ptrdiff_t(s) * D::STEP);
#pragma GCC unroll 32
            for (int j = 0; j < NR; ++j) c[i][j] = D::mac(c[i][j], av, bv[j]);
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 32
        for (int j = 0; j < NR; ++j) acc[i][j] = c[i][j];
}

// Calls f.template operator()<MR>(first row) over `rows` rows, MAX at a time and the rest at once.
template <int MAX, class F>
inline void for_row_blocks(int rows, const F& f) {
    int row = 0;
    for (; row + MAX <= rows; row += MAX) f.template operator()<MAX>(row);
    switch (rows - row) {
        case 7: if constexpr (MAX > 7) f.template operator()<7>(row); break;
        case 6: if constexpr (MAX > 6) f.template operator()<6>(row); break;
        case 5: if constexpr (MAX > 5) f.template operator()<5>(row); break;
        case 4: if constexpr (MAX > 4) f.template operator()<4>(row); break;
        case 3: if constexpr (MAX > 3) f.template operator()<3>(row); break;
        case 2: if constexpr (MAX > 2) f.template operator()<2>(row); break;
        case 1: f.template operator()<1>(row); break;
        default: break;
    }
}

}  // namespace tp
