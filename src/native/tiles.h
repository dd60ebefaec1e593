// A tile of the paged cache as strips for the one matrix product (dot.h): KEYS tokens from a multiple of KEYS on.
#pragma once
#include <algorithm>
#include <type_traits>

#include "dot.h"
#include "step.h"

namespace tp {

constexpr int KEYS = 64;

typedef uint16_t u32x16 __attribute__((vector_size(64)));  // thirty-two 16-bit integers

// Up to 64 bytes, zeros behind.
inline v16 load_bytes(const void* p, int bytes) {
    v16 v = splat(0);
    if (bytes >= 64) memcpy(&v, p, 64);
#if defined(__AVX512BW__)
    else v = (v16)_mm512_maskz_loadu_epi8((1ull << bytes) - 1, p);
#else
    else memcpy(&v, p, size_t(bytes));
#endif
    return v;
}

// Whether a tile of K for the product D is made of codes, four in a lane as they are loaded.
template <class D, class K>
constexpr bool codes = D::STEP == 2 && std::is_same_v<K, e4m3>;

// Keys of one head: strips of sixteen keys, [dim / STEP][16][STEP]; keys from `valid` on are zeros and are not read.
// bf16 pairs travel as one 32-bit lane, so both layouts are the same 16 x 16 transposition; so do four e4m3 codes, which are two
// pairs afterwards.
template <class D, class K>
void stage_keys(const KvView& kv, const int32_t* pages, int head, int first, int valid, typename D::B* out) {
    int steps = (kv.dim + D::STEP - 1) / D::STEP;
    for (int strip = 0; strip < KEYS / 16; ++strip) {
        const K* from[16];
        for (int i = 0; i < 16; ++i) {
            int key = strip * 16 + i;
            from[i] = key < valid ? reinterpret_cast<const K*>(kv.keys + kv.offset(pages, first + key)) + head * kv.dim : nullptr;
        }
        for (int s = 0; s < steps; s += codes<D, K> ? 32 : 16) {
            v16 m[16];
            int at = s * D::STEP, left = kv.dim - at;
            for (int i = 0; i < 16; ++i) {
                if (!from[i]) m[i] = splat(0);
                else if constexpr (D::STEP == 2) m[i] = load_bytes(from[i] + at, left * int(sizeof(K)));
                else m[i] = load_some(from[i] + at, left);
            }
            transpose(m);
            typename D::B* to = out + (int64_t(strip) * steps + s) * 16 * D::STEP;
            if constexpr (codes<D, K>) {
                for (int i = 0; i < std::min(32, steps - s); i += 2) {
                    Pairs p = pairs(m[i / 2]);
                    memcpy(to + i * 32, &p.first, 64);
                    if (i + 1 < steps - s) memcpy(to + (i + 1) * 32, &p.second, 64);
                }
            } else {
                for (int i = 0; i < std::min(16, steps - s); ++i) memcpy(to + i * 16 * D::STEP, &m[i], 64);
            }
        }
    }
}

// Values of one head: strips of sixteen elements of the head, [KEYS / STEP][16][STEP]; missing keys and elements are zeros.
template <class D, class K>
void stage_values(const KvView& kv, const int32_t* pages, int head, int first, int valid, typename D::B* out) {
    int strips = (kv.dim + 15) / 16;
    for (int key = 0; key < KEYS; key += D::STEP) {
        const K* from[D::STEP];
        for (int i = 0; i < D::STEP; ++i)
            from[i] = key + i < valid
                          ? reinterpret_cast<const K*>(kv.values + kv.offset(pages, first + key + i)) + head * kv.dim
                          : nullptr;
        typename D::B* to = out + key * 16;
        if constexpr (codes<D, K>) {
            // Elements of two tokens in turn, j of both and then j + 16 of both in lane j: of the first 32 elements, and of the next.
#define TP_LANE(j) j / 2 + j % 2 * 32, j / 2 + j % 2 * 32 + 8
            const u32x16 near = {TP_LANES(TP_LANE)}, far = near + 16;
#undef TP_LANE
            for (int s = 0; s < strips; s += 2) {
                int at = s / 4 * 64, bytes = kv.dim - at;
                u32x16 a = from[0] ? (u32x16)load_bytes(from[0] + at, bytes) : u32x16{};
                u32x16 b = from[1] ? (u32x16)load_bytes(from[1] + at, bytes) : u32x16{};
                u32x16 even = (a & 0xff) | (b << 8), odd = (a >> 8) | (b & 0xff00);
                Pairs p = pairs((v16)__builtin_shuffle(even, odd, s % 4 ? far : near));
                memcpy(to + int64_t(s) * KEYS * 16, &p.first, 64);
                if (s + 1 < strips) memcpy(to + int64_t(s + 1) * KEYS * 16, &p.second, 64);
            }
        } else if constexpr (D::STEP == 2) {
            // Elements of two tokens in turn: the first sixteen of each, and the next.
            const u32x16 near = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
            const u32x16 far = near + 16;
            for (int s = 0; s < strips; s += 2) {
                int bytes = (kv.dim - s * 16) * 2;
                u32x16 a = from[0] ? (u32x16)load_bytes(from[0] + s * 16, bytes) : u32x16{};
                u32x16 b = from[1] ? (u32x16)load_bytes(from[1] + s * 16, bytes) : u32x16{};
                u32x16 first_half = __builtin_shuffle(a, b, near), second_half = __builtin_shuffle(a, b, far);
                memcpy(to + int64_t(s) * KEYS * 16, &first_half, 64);
                if (s + 1 < strips) memcpy(to + int64_t(s + 1) * KEYS * 16, &second_half, 64);
            }
        } else {
            for (int s = 0; s < strips; ++s) {
                v16 v = from[0] ? load_some(from[0] + s * 16, kv.dim - s * 16) : splat(0);
                memcpy(to + int64_t(s) * KEYS * 16, &v, 64);
            }
        }
    }
}

}  // namespace tp
