#include <algorithm>

#include "attention.h"
#include "elementwise.h"
#include "pool.h"

namespace tp {
namespace {

constexpr int TASK_TOKENS = 8;

// One head: norm (with a scale), round, rotate the first `rotary` elements (halves are pairs), round. work: float [dim].
template <class T, class Out>
void norm_and_rotate(const T* x, int dim, int rotary, const float* scale, float eps, const float* cos_sin, float* work, Out* y) {
    v16 inverse = splat(scale ? inverse_rms(x, dim, eps) : 1.0f);
    for (int i = 0; i < dim; i += 16) {
        int n = dim - i;
        v16 v = load_some(x + i, n);
        store_some(work + i, scale ? rounded<T>(v * inverse * load_some(scale + i, n)) : v, n);
    }
    int half = rotary / 2;
    for (int i = 0; i < half; i += 16) {
        int n = half - i;
        v16 c = load_some(cos_sin + i, n), s = load_some(cos_sin + half + i, n);
        v16 low = load_some(work + i, n), high = load_some(work + half + i, n);
        store_some(y + i, rounded<T>(fma(-high, s, low * c)), n);
        store_some(y + half + i, rounded<T>(fma(low, s, high * c)), n);
    }
    for (int i = rotary; i < dim; i += 16) store_some(y + i, load_some(work + i, dim - i), dim - i);
}

template <class T, class K>
void one_token(const Attention& layer, const Rows& rows, const KvView& kv, int row, int token, const T* proj, T* q) {
    int dim = layer.dim, position = int(rows.positions[token]);
    const float* cos_sin = layer.table + int64_t(position) * layer.rotary;
    float* work = static_cast<float*>(scratch(2, int64_t(dim) * 4 + 64));
    for (int h = 0; h < layer.heads; ++h)
        norm_and_rotate(proj + h * layer.query_columns(), dim, layer.rotary, layer.query_scale, layer.eps, cos_sin, work, q + h * dim);
    int64_t at = kv.offset(rows.pages[size_t(row)], position);
    K* keys = reinterpret_cast<K*>(kv.keys + at);
    K* values = reinterpret_cast<K*>(kv.values + at);
    const T* in = proj + layer.heads * layer.query_columns();
    for (int h = 0; h < layer.kv_heads; ++h)
        norm_and_rotate(in + h * dim, dim, layer.rotary, layer.key_scale, layer.eps, cos_sin, work, keys + h * dim);
    in += layer.kv_heads * dim;
    int width = layer.kv_heads * dim;
    for (int i = 0; i < width; i += 16) store_some(values + i, load_some(in + i, width - i), width - i);
}

}  // namespace

void rotate_and_store(const Attention& layer, const Rows& rows, const KvView& kv, const void* proj, int64_t ld, void* q) {
    with_type(layer.dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        with_kv_type(kv.dtype, [&](auto* k) {
            using K = std::remove_pointer_t<decltype(k)>;
            for_each((rows.tokens + TASK_TOKENS - 1) / TASK_TOKENS, [&](int task) {
                int first = task * TASK_TOKENS, row = rows.row_of(first);
                for (int i = first; i < std::min(rows.tokens, first + TASK_TOKENS); ++i) {
                    while (rows.offsets[row + 1] <= i) ++row;
                    one_token<T, K>(layer, rows, kv, row, i, static_cast<const T*>(proj) + i * ld,
                                    static_cast<T*>(q) + int64_t(i) * layer.heads * layer.dim);
                }
            });
        });
    });
}

}  // namespace tp
