#include <algorithm>
#include <cmath>
#include <cstring>

#include "elementwise.h"
#include "gdn.h"
#include "pool.h"

namespace tp {
namespace {

constexpr float NORM_EPS = 1e-6f;  // of the l2 norm of queries and keys
constexpr int PREPARE_TOKENS = 16;

// Per token and head, what the recurrence needs in float32.
struct Prepared {
    int dim;                      // key_dim rounded up to 16, zeros behind
    float* keys;                  // [tokens][key_heads][2][dim]: normalised key, normalised and scaled query
    float* overlap;               // [tokens][key_heads]: key . query
    float *decay, *beta;          // [tokens][value_heads]
};

template <class T>
void normalise(const T* x, int n, int padded, float scale, float* y) {
    v16 squares = splat(0);
    for (int i = 0; i < n; i += 16) {
        v16 v = load_some(x + i, n - i);
        squares = fma(v, v, squares);
    }
    v16 inverse = splat(1.0f / std::sqrt(sum(squares) + NORM_EPS));
    for (int i = 0; i < padded; i += 16) store(y + i, load_some(x + i, std::max(0, n - i)) * inverse * splat(scale));
}

template <class T>
void prepare(const Gdn& layer, int64_t token, const T* mixed, const T* b, const T* a, const Prepared& out) {
    int keys = layer.key_heads * layer.key_dim;
    float scale = 1.0f / std::sqrt(float(layer.key_dim));
    for (int h = 0; h < layer.key_heads; ++h) {
        float* k = out.keys + (token * layer.key_heads + h) * 2 * out.dim;
        float* q = k + out.dim;
        normalise(mixed + h * layer.key_dim, layer.key_dim, out.dim, scale, q);
        normalise(mixed + keys + h * layer.key_dim, layer.key_dim, out.dim, 1.0f, k);
        v16 dot = splat(0);
        for (int i = 0; i < out.dim; i += 16) dot = fma(load(k + i), load(q + i), dot);
        out.overlap[token * layer.key_heads + h] = sum(dot);
    }
    for (int h = 0; h < layer.value_heads; ++h) {
        float rate = layer.decay_rate[h] * softplus(to_float(a[h]) + layer.dt_bias[h]);
        out.decay[token * layer.value_heads + h] = std::exp(rate);
        out.beta[token * layer.value_heads + h] = rounded<T>(1.0f / (1.0f + std::exp(-to_float(b[h]))));
    }
}

// The last token's update, not yet in the state: state = round(state * decay + delta key).
struct Update {
    float decay;
    float delta[16];
    const float* key;
};

// R rows of a head's state [..][dim]: finish the last token's update (WRITE) and take the next token's two products with what
// results (READ). Token by token the arithmetic is that of one token alone: the fusion only saves a trip through the cache.
// NV: vectors a row, 0 if dim is not 16 * NV.
template <class S, int NV, int R, bool WRITE, bool READ>
inline void pass_rows(S* state, int dim, const Update& last, int first, const float* key, const float* query, v16* with_key,
                      v16* with_query) {
    int nv = NV ? NV : (dim + 15) / 16;
    v16 decay = splat(last.decay), delta[R], k[R], q[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) delta[r] = splat(last.delta[first + r]), k[r] = q[r] = splat(0);
#pragma GCC unroll 8
    for (int i = 0; i < nv; ++i) {
        int n = NV ? 16 : dim - 16 * i;
        v16 old_key = WRITE ? load(last.key + 16 * i) : splat(0);
        v16 new_key = READ ? load(key + 16 * i) : splat(0), new_query = READ ? load(query + 16 * i) : splat(0);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            S* at = state + int64_t(first + r) * dim + 16 * i;
            v16 s = load_some(at, n);
            if (WRITE) {
                s = rounded<S>(fma(delta[r], old_key, s * decay));
                store_some(at, s, n);
            }
            if (READ) {
                k[r] = fma(s, new_key, k[r]);
                q[r] = fma(s, new_query, q[r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        if (READ) with_key[first + r] = k[r], with_query[first + r] = q[r];
}

template <class S, int NV, bool WRITE, bool READ>
inline void pass(S* state, int rows, int dim, const Update& last, const float* key, const float* query, v16* with_key,
                 v16* with_query) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) pass_rows<S, NV, 4, WRITE, READ>(state, dim, last, r, key, query, with_key, with_query);
    for (; r < rows; ++r) pass_rows<S, NV, 1, WRITE, READ>(state, dim, last, r, key, query, with_key, with_query);
}

constexpr int BLOCKS = 2;  // of sixteen rows, side by side: one's sums are taken while the other's pass runs

// Tokens [from, to) of the packed axis on rows [first, first + rows) of one head's state, at most 16 * BLOCKS.
template <class T, class S, int NV>
void recur(const Gdn& layer, const Prepared& p, const T* mixed, int head, int first, int rows, int64_t from, int64_t to,
           S* state, T* o) {
    int key_head = head / (layer.value_heads / layer.key_heads), dim = layer.key_dim;
    int column = head * layer.value_dim + first;
    const T* values = mixed + 2 * layer.key_heads * dim + column;
    Update last[BLOCKS] = {};
    v16 with_key[16], with_query[16];
    for (int64_t t = from; t < to; ++t) {
        const float* key = p.keys + (t * layer.key_heads + key_head) * 2 * p.dim;
        v16 decay = splat(p.decay[t * layer.value_heads + head]), beta = splat(p.beta[t * layer.value_heads + head]);
        v16 overlap = splat(p.overlap[t * layer.key_heads + key_head]);
        for (int b = 0; b * 16 < rows; ++b) {
            int n = std::min(16, rows - b * 16);
            S* block = state + int64_t(b) * 16 * dim;
            for (int r = n; r < 16; ++r) with_key[r] = with_query[r] = splat(0);
            if (t == from) pass<S, NV, false, true>(block, n, dim, last[b], key, key + p.dim, with_key, with_query);
            else pass<S, NV, true, true>(block, n, dim, last[b], key, key + p.dim, with_key, with_query);
            v16 remembered = row_sums(with_key) * decay;
            v16 delta = (load_some(values + t * layer.channels() + b * 16, n) - remembered) * beta;
            store_some(o + t * layer.values() + column + b * 16, fma(delta, overlap, row_sums(with_query) * decay), n);
            last[b].decay = p.decay[t * layer.value_heads + head];
            store(last[b].delta, delta);
            last[b].key = key;
        }
    }
    for (int b = 0; to > from && b * 16 < rows; ++b)
        pass<S, NV, true, false>(state + int64_t(b) * 16 * dim, std::min(16, rows - b * 16), dim, last[b], nullptr, nullptr,
                                 with_key, with_query);
}

template <class T, class S, int NV>
void row_block(const Gdn& layer, const Rows& rows, const SlotView& ssm, const Prepared& p, const T* mixed, int row, int head,
               int first, T* o) {
    int n = std::min(16 * BLOCKS, layer.value_dim - first);
    int64_t at = (int64_t(head) * layer.value_dim + first) * layer.key_dim;
    S* state = reinterpret_cast<S*>(ssm.at(rows.slots[row])) + at;
    int64_t from = rows.offsets[row], to = rows.offsets[row + 1];
    if (int mark = rows.checkpoint_offsets[row]) {
        recur<T, S, NV>(layer, p, mixed, head, first, n, from, from + mark, state, o);
        S* copy = reinterpret_cast<S*>(ssm.at(rows.checkpoint_slots[row])) + at;
        memcpy(copy, state, sizeof(S) * size_t(n) * size_t(layer.key_dim));
        from += mark;
    }
    recur<T, S, NV>(layer, p, mixed, head, first, n, from, to, state, o);
}

template <class T, class S, int NV>
void all_blocks(const Gdn& layer, const Rows& rows, const SlotView& ssm, const Prepared& p, const T* mixed, T* o) {
    // A long row is cut finely, for balance; a step of many short rows takes whole heads.
    int span = rows.tokens > 4 * rows.count ? 16 * BLOCKS : layer.value_dim;
    int spans = (layer.value_dim + span - 1) / span;
    for_each(rows.count * layer.value_heads * spans, [&](int task) {
        int head = task / spans % layer.value_heads, row = task / spans / layer.value_heads, begin = task % spans * span;
        for (int first = begin; first < std::min(layer.value_dim, begin + span); first += 16 * BLOCKS)
            row_block<T, S, NV>(layer, rows, ssm, p, mixed, row, head, first, o);
    });
}

}  // namespace

void delta_rule(const Gdn& layer, const Rows& rows, const SlotView& ssm, const void* mixed, const void* b, const void* a,
                int64_t ld, void* o) {
    Prepared p;
    p.dim = (layer.key_dim + 15) / 16 * 16;
    int64_t keys = int64_t(rows.tokens) * layer.key_heads, heads = int64_t(rows.tokens) * layer.value_heads;
    p.keys = static_cast<float*>(scratch(1, (keys * 2 * p.dim + keys + 2 * heads) * 4));
    p.overlap = p.keys + keys * 2 * p.dim;
    p.decay = p.overlap + keys;
    p.beta = p.decay + heads;
    with_type(layer.dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        for_each((rows.tokens + PREPARE_TOKENS - 1) / PREPARE_TOKENS, [&](int task) {
            int last = std::min(rows.tokens, (task + 1) * PREPARE_TOKENS);
            for (int64_t i = task * PREPARE_TOKENS; i < last; ++i)
                prepare(layer, i, static_cast<const T*>(mixed) + i * layer.channels(), static_cast<const T*>(b) + i * ld,
                        static_cast<const T*>(a) + i * ld, p);
        });
        with_type(ssm.dtype, [&](auto* s) {
            using S = std::remove_pointer_t<decltype(s)>;
            const T* x = static_cast<const T*>(mixed);
            if (layer.key_dim == 128) all_blocks<T, S, 8>(layer, rows, ssm, p, x, static_cast<T*>(o));
            else if (layer.key_dim == 64) all_blocks<T, S, 4>(layer, rows, ssm, p, x, static_cast<T*>(o));
            else all_blocks<T, S, 0>(layer, rows, ssm, p, x, static_cast<T*>(o));
        });
    });
}

void gdn(const Gdn& layer, const Rows& rows, const SlotView& conv, const SlotView& ssm, const void* proj, int64_t ld, void* out) {
    int item = item_bytes(layer.dtype);
    void* mixed = scratch(0, int64_t(rows.tokens) * layer.channels() * item);
    const char* z = static_cast<const char*>(proj) + int64_t(layer.channels()) * item;
    const char* b = z + int64_t(layer.values()) * item;
    const char* a = b + int64_t(layer.value_heads) * item;
    causal_conv(layer.conv(), rows, conv, proj, ld, mixed);
    delta_rule(layer, rows, ssm, mixed, b, a, ld, out);
    gated_rms_norm(out, layer.values(), z, ld, out, layer.values(), rows.tokens, layer.value_heads, layer.value_dim,
                   layer.norm_weight, layer.eps, layer.dtype);
}

}  // namespace tp
