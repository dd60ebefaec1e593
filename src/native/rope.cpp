#include <algorithm>

#include "attention.h"
#include "elementwise.h"
#include "pool.h"

namespace tp {
namespace {

constexpr int TASK_TOKENS = 8;

// Rotates the pairs (i, i + half) of x into y, rounded to T; y may be x.
template <class T, class In, class Out>
void rotate_pairs(const In* x, int half, const float* cosines, const float* sines, Out* y) {
    for (int i = 0; i < half; i += 16) {
        int n = half - i;
        v16 c = load_some(cosines + i, n), s = load_some(sines + i, n);
        v16 low = load_some(x + i, n), high = load_some(x + half + i, n);
        store_some(y + i, rounded<T>(fma(-high, s, low * c)), n);
        store_some(y + half + i, rounded<T>(fma(low, s, high * c)), n);
    }
}

// One head: norm, round, rotate the first `rotary` elements (halves are pairs), round. work: float [dim].
template <class T, class Out>
void norm_and_rotate(const T* x, int dim, int rotary, const float* scale, float eps, const float* cos_sin, float* work, Out* y) {
    v16 inverse = splat(inverse_rms(x, dim, eps));
    for (int i = 0; i < dim; i += 16) {
        int n = dim - i;
        store_some(work + i, rounded<T>(load_some(x + i, n) * inverse * load_some(scale + i, n)), n);
    }
    rotate_pairs<T>(work, rotary / 2, cos_sin, cos_sin + rotary / 2, y);
    for (int i = rotary; i < dim; i += 16) store_some(y + i, load_some(work + i, dim - i), dim - i);
}

template <class T, class K>
void one_token(const Attention& layer, const Rows& rows, const KvView& kv, int row, int token, const T* proj, T* q) {
    int dim = layer.dim, position = int(rows.positions[token]);
    const float* cos_sin = layer.table + int64_t(position) * layer.rotary;
    float* work = static_cast<float*>(scratch(2, int64_t(dim) * 4 + 64));
    for (int h = 0; h < layer.heads; ++h)
        norm_and_rotate(proj + h * 2 * dim, dim, layer.rotary, layer.query_scale, layer.eps, cos_sin, work, q + h * dim);
    int64_t at = kv.offset(rows.pages[size_t(row)], position);
    K* keys = reinterpret_cast<K*>(kv.keys + at);
    K* values = reinterpret_cast<K*>(kv.values + at);
    const T* in = proj + layer.heads * 2 * dim;
    for (int h = 0; h < layer.kv_heads; ++h)
        norm_and_rotate(in + h * dim, dim, layer.rotary, layer.key_scale, layer.eps, cos_sin, work, keys + h * dim);
    in += layer.kv_heads * dim;
    int width = layer.kv_heads * dim;
    for (int i = 0; i < width; i += 16) store_some(values + i, load_some(in + i, width - i), width - i);
}

// f(row, token) for all packed tokens, several a task.
template <class F>
void for_tokens(const Rows& rows, const F& f) {
    for_each((rows.tokens + TASK_TOKENS - 1) / TASK_TOKENS, [&](int task) {
        int first = task * TASK_TOKENS, row = rows.row_of(first);
        for (int i = first; i < std::min(rows.tokens, first + TASK_TOKENS); ++i) {
            while (rows.offsets[row + 1] <= i) ++row;
            f(row, i);
        }
    });
}

template <class T, class K>
void copy_converted(const T* from, int n, char* to) {
    for (int i = 0; i < n; i += 16) store_some(reinterpret_cast<K*>(to) + i, load_some(from + i, n - i), n - i);
}

}  // namespace

void rotate_and_store(const Attention& layer, const Rows& rows, const KvView& kv, const void* proj, int64_t ld, void* q) {
    with_type(layer.dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        with_type(kv.dtype, [&](auto* k) {
            using K = std::remove_pointer_t<decltype(k)>;
            for_tokens(rows, [&](int row, int i) {
                one_token<T, K>(layer, rows, kv, row, i, static_cast<const T*>(proj) + i * ld,
                                static_cast<T*>(q) + int64_t(i) * layer.heads * layer.dim);
            });
        });
    });
}

void rotate(const Rotation& r, void* x, const int64_t* positions, int tokens, Dtype dtype) {
    int half = r.rotary / 2;
    with_type(dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        for_each((tokens + TASK_TOKENS - 1) / TASK_TOKENS, [&](int task) {
            for (int64_t i = task * TASK_TOKENS; i < std::min(tokens, (task + 1) * TASK_TOKENS); ++i)
                for (int h = 0; h < r.heads; ++h) {
                    T* head = static_cast<T*>(x) + i * r.token_stride + h * r.head_stride;
                    rotate_pairs<T>(head, half, r.cosines + positions[i] * half, r.sines + positions[i] * half, head);
                }
        });
    });
}

void write_kv(const Rows& rows, const KvView& kv, const void* keys, int64_t ldk, const void* values, int64_t ldv, Dtype dtype) {
    int width = kv.heads * kv.dim;
    with_type(dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        with_type(kv.dtype, [&](auto* k) {
            using K = std::remove_pointer_t<decltype(k)>;
            for_tokens(rows, [&](int row, int i) {
                int64_t to = kv.offset(rows.pages[size_t(row)], int(rows.positions[i]));
                copy_converted<T, K>(static_cast<const T*>(keys) + i * ldk, width, kv.keys + to);
                copy_converted<T, K>(static_cast<const T*>(values) + i * ldv, width, kv.values + to);
            });
        });
    });
}

}  // namespace tp
