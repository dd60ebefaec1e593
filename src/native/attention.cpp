#include "attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "tiles.h"

namespace tp {
namespace {

// Keys are visited in tiles of KEYS and folded in segments of SEGMENT, both at absolute positions: every query sees the same
// tiles and the same folds in a prefill, a decode step or any cut of either. Segments of a long context can run in parallel.
constexpr int SEGMENT = 1024;
constexpr float LOWEST = -1e30f;  // finite: exp(-inf - LOWEST) is 0 and never NaN

// Queries of one row and one key-value head that end in the same tile: `tokens` tokens from packed token `first` on.
struct Unit {
    int row, first, tokens, position, head, valid;
    int segments() const { return (position + tokens - 1) / SEGMENT + 1; }
};

// A running softmax of some queries: out [queries][width], largest score, sum of weights.
struct Fold {
    float *out, *top, *total;
    int width;
    void reset(int queries) const {
        std::fill_n(out, int64_t(queries) * width, 0.0f);
        std::fill_n(top, queries, LOWEST);
        std::fill_n(total, queries, 0.0f);
    }
};
inline int64_t fold_floats(int queries, int width) { return (int64_t(queries) * (width + 2) + 15) / 16 * 16; }
inline Fold fold_at(float* p, int queries, int width) {
    return {p, p + int64_t(queries) * width, p + int64_t(queries) * (width + 1), width};
}

template <class D>
struct Work {
    typename D::B *keys, *values;  // staged tile
    typename D::A *q, *weights;    // [queries][padded dim], [queries][KEYS]
    float* scores;                 // [queries][KEYS]
    Fold fold;
};

// C [rows][ldc] = (or +=) A B, `strips` strips.
template <class D, bool ADD>
void product(const typename D::A* a, ptrdiff_t lda, int rows, const typename D::B* b, ptrdiff_t strip, int steps, int strips,
             float* c, ptrdiff_t ldc) {
    auto group = [&]<int N>(int s) {
        for_row_blocks<6>(rows, [&]<int MR>(int r) {
            v16 acc[MR][N];
            for (int i = 0; i < MR; ++i)
                for (int j = 0; j < N; ++j) acc[i][j] = ADD ? load(c + (r + i) * ldc + (s + j) * 16) : splat(0);
            multiply<D, MR, N>(a + r * lda, lda, b + s * strip, strip, steps, acc);
            for (int i = 0; i < MR; ++i)
                for (int j = 0; j < N; ++j) store(c + (r + i) * ldc + (s + j) * 16, acc[i][j]);
        });
    };
    int s = 0;
    for (; s + 4 <= strips; s += 4) group.template operator()<4>(s);
    for (; s < strips; ++s) group.template operator()<1>(s);
}

// Turns one query's scores of a tile into weights and brings its fold to the new largest score.
template <class A>
void weigh(const float* scores, int visible, float scale, A* weights, float* out, int width, float& top, float& total) {
    const v16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    v16 s[KEYS / 16], highest = splat(LOWEST);
    for (int j = 0; j < KEYS / 16; ++j) {
        v16 masked = lane < splat(float(visible - j * 16)) ? load(scores + j * 16) * splat(scale) : splat(-INFINITY);
        s[j] = masked;
        highest = larger(highest, masked);
    }
    float next = std::max(top, largest(highest));
    v16 sums = splat(0);
    for (int j = 0; j < KEYS / 16; ++j) {
        v16 w = rounded<A>(exp(s[j] - splat(next)));
        store(weights + j * 16, w);
        sums = sums + w;
    }
    v16 keep = exp(splat(top - next));
    total = total * keep[0] + sum(sums);
    top = next;
    if (keep[0] != 1.0f)
        for (int i = 0; i < width; i += 16) store(out + i, load(out + i) * keep);
}

// Folds keys [from, to) of the unit's sequence into work.fold, tile by tile.
template <class D, class K>
void fold_segment(const Attention& layer, const Rows& rows, const KvView& kv, const Unit& u, const Work<D>& work, int from, int to) {
    int group = layer.heads / layer.kv_heads, queries = u.tokens * group, width = work.fold.width;
    int steps = (layer.dim + D::STEP - 1) / D::STEP;
    const int32_t* pages = rows.pages[size_t(u.row)];
    work.fold.reset(queries);
    for (int first = from; first < to; first += KEYS) {
        int valid = std::min(KEYS, u.valid - first);
        stage_keys<D, K>(kv, pages, u.head, first, valid, work.keys);
        stage_values<D, K>(kv, pages, u.head, first, valid, work.values);
        product<D, false>(work.q, steps * D::STEP, queries, work.keys, ptrdiff_t(steps) * 16 * D::STEP, steps, KEYS / 16,
                          work.scores, KEYS);
        for (int i = 0; i < queries; ++i)
            weigh(work.scores + i * KEYS, std::min(KEYS, u.position + i / group + 1 - first), layer.scale, work.weights + i * KEYS,
                  work.fold.out + int64_t(i) * width, width, work.fold.top[i], work.fold.total[i]);
        product<D, true>(work.weights, KEYS, queries, work.values, KEYS * 16, KEYS / D::STEP, width / 16, work.fold.out, width);
    }
}

// all = all and part, as if the part's keys came after all's.
void merge(const Fold& all, const Fold& part, int queries) {
    for (int i = 0; i < queries; ++i) {
        float next = std::max(all.top[i], part.top[i]);
        v16 mine = exp(splat(all.top[i] - next)), theirs = exp(splat(part.top[i] - next));
        all.total[i] = all.total[i] * mine[0] + part.total[i] * theirs[0];
        all.top[i] = next;
        float *a = all.out + int64_t(i) * all.width, *b = part.out + int64_t(i) * all.width;
        for (int j = 0; j < all.width; j += 16) store(a + j, fma(load(a + j), mine, load(b + j) * theirs));
    }
}

template <class T>
void write_out(const Attention& layer, const Unit& u, const Fold& fold, const T* proj, int64_t ld, T* out) {
    int group = layer.heads / layer.kv_heads;
    for (int i = 0; i < u.tokens * group; ++i) {
        int64_t token = u.first + i / group;
        int h = u.head * group + i % group;
        const T* gate = layer.gated ? proj + token * ld + (2 * h + 1) * layer.dim : nullptr;
        T* to = out + (token * layer.heads + h) * layer.dim;
        v16 total = splat(fold.total[i]);
        for (int j = 0; j < layer.dim; j += 16) {
            int n = layer.dim - j;
            v16 value = rounded<T>(load(fold.out + int64_t(i) * fold.width + j) / total);
            store_some(to + j, gate ? value * rounded<T>(sigmoid(load_some(gate + j, n))) : value, n);
        }
    }
}

std::vector<Unit> units_of(const Attention& layer, const Rows& rows, int tokens_each) {
    std::vector<Unit> units;
    for (int r = 0; r < rows.count; ++r) {
        int start = rows.starts[r], end = rows.ends[r];
        // Latest first: the longest tasks must not come last.
        for (int last = end; last > start;) {
            int first = std::max(start, (last - 1) / tokens_each * tokens_each);
            for (int h = 0; h < layer.kv_heads; ++h) units.push_back({r, rows.offsets[r] + first - start, last - first, first, h, end});
            last = first;
        }
    }
    return units;
}

template <class D>
Work<D> make_work(const Attention& layer, int queries) {
    int steps = (layer.dim + D::STEP - 1) / D::STEP, width = (layer.dim + 15) / 16 * 16;
    auto bytes = [](int64_t n) { return (n + 63) / 64 * 64; };
    int64_t keys = bytes(int64_t(KEYS) * steps * D::STEP * int(sizeof(typename D::B)));
    int64_t values = bytes(int64_t(KEYS) * width * int(sizeof(typename D::B)));
    int64_t q = bytes(int64_t(queries) * steps * D::STEP * int(sizeof(typename D::A)));
    int64_t weights = bytes(int64_t(queries) * KEYS * int(sizeof(typename D::A)));
    int64_t scores = int64_t(queries) * KEYS * 4, fold = fold_floats(queries, width) * 4;
    char* p = static_cast<char*>(scratch(3, keys + values + q + weights + scores + fold));
    Work<D> work;
    work.keys = reinterpret_cast<typename D::B*>(p);
    work.values = reinterpret_cast<typename D::B*>(p += keys);
    work.q = reinterpret_cast<typename D::A*>(p += values);
    work.weights = reinterpret_cast<typename D::A*>(p += q);
    work.scores = reinterpret_cast<float*>(p += weights);
    work.fold = fold_at(reinterpret_cast<float*>(p += scores), queries, width);
    return work;
}

// The unit's queries side by side, zeros behind each.
template <class D, class T>
void gather_queries(const Attention& layer, const Unit& u, const T* q, typename D::A* to) {
    int group = layer.heads / layer.kv_heads, padded = (layer.dim + D::STEP - 1) / D::STEP * D::STEP;
    for (int i = 0; i < u.tokens * group; ++i) {
        const T* from = q + (int64_t(u.first + i / group) * layer.heads + u.head * group + i % group) * layer.dim;
        for (int j = 0; j < padded; j += 16)
            store_some(to + int64_t(i) * padded + j, load_some(from + j, std::max(0, layer.dim - j)), padded - j);
    }
}

template <class D, class T, class K>
void attend_typed(const Attention& layer, const Rows& rows, const KvView& kv, const T* q, const T* proj, int64_t ld, T* out) {
    int group = layer.heads / layer.kv_heads, width = (layer.dim + 15) / 16 * 16;
    int tokens_each = 1;
    while (tokens_each * 2 * group <= 64 && tokens_each < KEYS) tokens_each *= 2;
    std::vector<Unit> units = units_of(layer, rows, tokens_each);
    int queries = tokens_each * group;
    int64_t floats = fold_floats(queries, width);
    // Few long units: one task a segment. Otherwise one task a unit.
    bool split = int(units.size()) < 4 * threads() && rows.tokens <= 64;
    std::vector<int> first_part(1, 0);
    for (const Unit& u : units) first_part.push_back(first_part.back() + (split ? u.segments() : 1));
    float* parts = static_cast<float*>(scratch(1, floats * 4 * first_part.back() * (split ? 1 : 0) + 64));
    for_each(first_part.back(), [&](int task) {
        int which = int(std::upper_bound(first_part.begin(), first_part.end(), task) - first_part.begin()) - 1;
        const Unit& u = units[size_t(which)];
        Work<D> work = make_work<D>(layer, queries);
        gather_queries<D>(layer, u, q, work.q);
        int end = u.position + u.tokens;
        if (split) {
            int from = (task - first_part[size_t(which)]) * SEGMENT;
            work.fold = fold_at(parts + floats * task, queries, width);
            fold_segment<D, K>(layer, rows, kv, u, work, from, std::min(end, from + SEGMENT));
            return;
        }
        Fold all = fold_at(static_cast<float*>(scratch(4, floats * 4)), queries, width);
        all.reset(u.tokens * group);
        for (int from = 0; from < end; from += SEGMENT) {
            fold_segment<D, K>(layer, rows, kv, u, work, from, std::min(end, from + SEGMENT));
            merge(all, work.fold, u.tokens * group);
        }
        write_out(layer, u, all, proj, ld, out);
    });
    if (!split) return;
    for_each(int(units.size()), [&](int which) {
        const Unit& u = units[size_t(which)];
        Fold all = fold_at(static_cast<float*>(scratch(4, floats * 4)), queries, width);
        all.reset(u.tokens * group);
        for (int part = first_part[size_t(which)]; part < first_part[size_t(which) + 1]; ++part)
            merge(all, fold_at(parts + floats * part, queries, width), u.tokens * group);
        write_out(layer, u, all, proj, ld, out);
    });
}

}  // namespace

void attend(const Attention& layer, const Rows& rows, const KvView& kv, const void* q, const void* proj, int64_t ld, void* out) {
    auto in_pairs = [&](auto* k) {
        attend_typed<DotBf16, bf16, std::remove_pointer_t<decltype(k)>>(
            layer, rows, kv, static_cast<const bf16*>(q), static_cast<const bf16*>(proj), ld, static_cast<bf16*>(out));
    };
    if (layer.dtype == Dtype::bf16 && kv.dtype == Dtype::bf16) return in_pairs(static_cast<bf16*>(nullptr));
    if (layer.dtype == Dtype::bf16 && kv.dtype == Dtype::e4m3) return in_pairs(static_cast<e4m3*>(nullptr));
    with_type(layer.dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        with_kv_type(kv.dtype, [&](auto* k) {
            using K = std::remove_pointer_t<decltype(k)>;
            attend_typed<DotF32, T, K>(layer, rows, kv, static_cast<const T*>(q), static_cast<const T*>(proj), ld,
                                       static_cast<T*>(out));
        });
    });
}

}  // namespace tp
