#include "delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "elementwise.h"
#include "pool.h"

namespace tp {
namespace {

constexpr float NORM_EPS = 1e-6f;  // of the l2 norm of queries and keys
constexpr int STEP_TOKENS = 512;   // prepared at once: bounds the memory that it takes
constexpr int PREPARE_TOKENS = 16;  // a task of that

template <class T>
struct Inputs {
    const T* mixed;
    const T* b;
    int64_t ldb;
    const T* a;
    int64_t lda;
};

// What the recurrence needs of one token in float32.
struct Token {
    const float *key, *query;  // normalised, the query scaled; zeros behind key_dim
    const float* decays;       // of every channel, by_channel
    float decay, beta, overlap;  // decay: 1 by_channel; overlap: key . query
};

// Tokens first, first + 1, ... of the packed axis.
struct Prepared {
    int64_t first;
    int key_heads, value_heads, dim, width;  // dim: key_dim rounded up to 16; width: vectors of dim a key head
    float* keys;                             // [tokens][key_heads][width][dim]: key, query, by_channel decays
    float* overlap;                          // [tokens][key_heads]
    float *decay, *beta;                     // [tokens][value_heads]

    Prepared(const DeltaRule& rule, int from, int to)
        : first(from), key_heads(rule.key_heads), value_heads(rule.value_heads), dim((rule.key_dim + 15) / 16 * 16),
          width(rule.by_channel ? 3 : 2) {
        int64_t tokens = to - from, each = int64_t(key_heads) * (width * dim + 1) + 2 * value_heads;
        keys = static_cast<float*>(scratch(1, tokens * each * 4));
        overlap = keys + tokens * key_heads * width * dim;
        decay = overlap + tokens * key_heads;
        beta = decay + tokens * value_heads;
    }
    float* key(int64_t t, int head) const { return keys + ((t - first) * key_heads + head) * width * dim; }
    Token token(int64_t t, int head) const {
        int64_t key_head = head / (value_heads / key_heads), at = (t - first) * value_heads + head;
        const float* k = key(t, int(key_head));
        return {k, k + dim, k + 2 * dim, decay[at], beta[at], overlap[(t - first) * key_heads + key_head]};
    }
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

// Decays of one head's n channels.
template <class T>
void channel_decays(const DeltaRule& rule, int head, const T* a, float* decays) {
    v16 rate = splat(rule.rate[head]), bound = splat(rule.lower_bound);
    const float* bias = rule.dt_bias + head * rule.key_dim;
    for (int i = 0; i < rule.key_dim; i += 16) {
        v16 x = load_some(a + head * rule.key_dim + i, rule.key_dim - i) + load_some(bias + i, rule.key_dim - i);
        store(decays + i, exp(std::isnan(rule.lower_bound) ? -rate * softplus(x) : bound * sigmoid(rate * x)));
    }
}

template <class T>
void prepare(const DeltaRule& rule, const Inputs<T>& in, int64_t t, const Prepared& out) {
    const T *mixed = in.mixed + t * rule.channels(), *a = in.a + t * in.lda, *b = in.b + t * in.ldb;
    int n = rule.key_dim, keys = rule.key_heads * n;
    float scale = 1.0f / std::sqrt(float(n));
    for (int h = 0; h < rule.key_heads; ++h) {
        float *k = out.key(t, h), *q = k + out.dim;
        normalise(mixed + h * n, n, out.dim, scale, q);
        normalise(mixed + keys + h * n, n, out.dim, 1.0f, k);
        v16 dot = splat(0);
        for (int i = 0; i < out.dim; i += 16) dot = fma(load(k + i), load(q + i), dot);
        out.overlap[(t - out.first) * rule.key_heads + h] = sum(dot);
        if (rule.by_channel) channel_decays(rule, h, a, q + out.dim);
    }
    for (int h = 0; h < rule.value_heads; ++h) {
        int64_t at = (t - out.first) * rule.value_heads + h;
        out.decay[at] = rule.by_channel ? 1.0f : std::exp(-rule.rate[h] * softplus(to_float(a[h]) + rule.dt_bias[h]));
        out.beta[at] = rounded<T>(1.0f / (1.0f + std::exp(-to_float(b[h])))) * rule.beta_scale;
    }
}

// A token's update that is not yet in the state: state = round(state * decay + delta key).
struct Update {
    Token token;
    float delta[16];
};

// R rows of a head's state [..][dim]: finish the last token's update (WRITE) and take the next token's two products with what
// results (READ). Token by token the arithmetic is that of one token alone: the fusion only saves a trip through the cache.
// NV: vectors a row, 0 if dim is not 16 * NV. WIDE: by_channel, where the products are with what the decays leave of key and query.
template <class S, int NV, bool WIDE, int R, bool WRITE, bool READ>
inline void pass_rows(S* state, int dim, const Update& last, int first, const Token& next, v16* with_key, v16* with_query) {
    int nv = NV ? NV : (dim + 15) / 16;
    v16 decay = splat(last.token.decay), delta[R], k[R], q[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) delta[r] = splat(last.delta[first + r]), k[r] = q[r] = splat(0);
#pragma GCC unroll 8
    for (int i = 0; i < nv; ++i) {
        int n = NV ? 16 : dim - 16 * i;
        v16 old_key = WRITE ? load(last.token.key + 16 * i) : splat(0);
        v16 new_key = READ ? load(next.key + 16 * i) : splat(0), new_query = READ ? load(next.query + 16 * i) : splat(0);
        if (WIDE && WRITE) decay = load(last.token.decays + 16 * i);
        if (WIDE && READ) {
            v16 left = load(next.decays + 16 * i);
            new_key = new_key * left, new_query = new_query * left;
        }
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

template <class S, int NV, bool WIDE, bool WRITE, bool READ>
inline void pass(S* state, int rows, int dim, const Update& last, const Token& next, v16* with_key, v16* with_query) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) pass_rows<S, NV, WIDE, 4, WRITE, READ>(state, dim, last, r, next, with_key, with_query);
    for (; r < rows; ++r) pass_rows<S, NV, WIDE, 1, WRITE, READ>(state, dim, last, r, next, with_key, with_query);
}

constexpr int BLOCKS = 2;  // of sixteen rows, side by side: one's sums are taken while the other's pass runs

// Tokens [from, to) of the packed axis on rows [first, first + rows) of one head's state, at most 16 * BLOCKS.
template <class T, class S, int NV, bool WIDE>
void recur(const DeltaRule& rule, const Prepared& p, const T* mixed, int head, int first, int rows, int64_t from, int64_t to,
           S* state, T* o) {
    int dim = rule.key_dim, column = head * rule.value_dim + first;
    const T* values = mixed + 2 * rule.key_heads * dim + column;
    Update last[BLOCKS] = {};
    v16 with_key[16], with_query[16];
    for (int64_t t = from; t < to; ++t) {
        const Token next = p.token(t, head);
        v16 decay = splat(next.decay), beta = splat(next.beta), overlap = splat(next.overlap);
        for (int b = 0; b * 16 < rows; ++b) {
            int n = std::min(16, rows - b * 16);
            S* block = state + int64_t(b) * 16 * dim;
            for (int r = n; r < 16; ++r) with_key[r] = with_query[r] = splat(0);
            if (t == from) pass<S, NV, WIDE, false, true>(block, n, dim, last[b], next, with_key, with_query);
            else pass<S, NV, WIDE, true, true>(block, n, dim, last[b], next, with_key, with_query);
            v16 remembered = row_sums(with_key) * decay;
            v16 delta = (load_some(values + t * rule.channels() + b * 16, n) - remembered) * beta;
            store_some(o + t * rule.values() + column + b * 16, fma(delta, overlap, row_sums(with_query) * decay), n);
            last[b].token = next;
            store(last[b].delta, delta);
        }
    }
    for (int b = 0; to > from && b * 16 < rows; ++b)
        pass<S, NV, WIDE, true, false>(state + int64_t(b) * 16 * dim, std::min(16, rows - b * 16), dim, last[b], {}, with_key,
                                       with_query);
}

// The tokens of one row that are prepared, on up to 16 * BLOCKS rows of a head's state from `first` on.
template <class T, class S, int NV, bool WIDE>
void row_block(const DeltaRule& rule, const Rows& rows, const SlotView& ssm, const Prepared& p, const T* mixed, int row, int head,
               int first, int64_t end, T* o) {
    int n = std::min(16 * BLOCKS, rule.value_dim - first);
    int64_t at = (int64_t(head) * rule.value_dim + first) * rule.key_dim;
    S* state = reinterpret_cast<S*>(ssm.at(rows.slots[row])) + at;
    int64_t from = std::max<int64_t>(p.first, rows.offsets[row]), to = std::min<int64_t>(end, rows.offsets[row + 1]);
    int64_t mark = rows.offsets[row] + rows.checkpoint_offsets[row];
    if (rows.checkpoint_offsets[row] && from < mark && mark <= to) {
        recur<T, S, NV, WIDE>(rule, p, mixed, head, first, n, from, mark, state, o);
        S* copy = reinterpret_cast<S*>(ssm.at(rows.checkpoint_slots[row])) + at;
        memcpy(copy, state, sizeof(S) * size_t(n) * size_t(rule.key_dim));
        from = mark;
    }
    recur<T, S, NV, WIDE>(rule, p, mixed, head, first, n, from, to, state, o);
}

// Tokens [first, last) of the packed axis, all heads.
template <class T, class S, int NV, bool WIDE>
void all_blocks(const DeltaRule& rule, const Rows& rows, const SlotView& ssm, const Prepared& p, const T* mixed, int first, int last,
                T* o) {
    int first_row = rows.row_of(first), count = rows.row_of(last - 1) + 1 - first_row;
    // A long row is cut finely, for balance; a step of many short rows takes whole heads.
    int span = last - first > 4 * count ? 16 * BLOCKS : rule.value_dim;
    int spans = (rule.value_dim + span - 1) / span;
    for_each(count * rule.value_heads * spans, [&](int task) {
        int head = task / spans % rule.value_heads, row = first_row + task / spans / rule.value_heads, begin = task % spans * span;
        for (int r = begin; r < std::min(rule.value_dim, begin + span); r += 16 * BLOCKS)
            row_block<T, S, NV, WIDE>(rule, rows, ssm, p, mixed, row, head, r, last, o);
    });
}

template <class T, class S, bool WIDE>
void by_width(const DeltaRule& rule, const Rows& rows, const SlotView& ssm, const Inputs<T>& in, int first, int last, T* o) {
    Prepared p(rule, first, last);
    for_each((last - first + PREPARE_TOKENS - 1) / PREPARE_TOKENS, [&](int task) {
        int begin = first + task * PREPARE_TOKENS;
        for (int64_t t = begin; t < std::min(last, begin + PREPARE_TOKENS); ++t) prepare(rule, in, t, p);
    });
    if (rule.key_dim == 128) all_blocks<T, S, 8, WIDE>(rule, rows, ssm, p, in.mixed, first, last, o);
    else if (rule.key_dim == 64) all_blocks<T, S, 4, WIDE>(rule, rows, ssm, p, in.mixed, first, last, o);
    else all_blocks<T, S, 0, WIDE>(rule, rows, ssm, p, in.mixed, first, last, o);
}

}  // namespace

void delta_rule(const DeltaRule& rule, const Rows& rows, const SlotView& ssm, const void* mixed, const void* b, int64_t ldb,
                const void* a, int64_t lda, void* o) {
    with_type(rule.dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        Inputs<T> in{static_cast<const T*>(mixed), static_cast<const T*>(b), ldb, static_cast<const T*>(a), lda};
        with_type(ssm.dtype, [&](auto* s) {
            using S = std::remove_pointer_t<decltype(s)>;
            auto run = rule.by_channel ? by_width<T, S, true> : by_width<T, S, false>;
            for (int first = 0; first < rows.tokens; first += STEP_TOKENS)
                run(rule, rows, ssm, in, first, std::min(rows.tokens, first + STEP_TOKENS), static_cast<T*>(o));
        });
    });
}

}  // namespace tp
