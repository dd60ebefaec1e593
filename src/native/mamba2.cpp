#include "mamba2.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "elementwise.h"
#include "pool.h"

namespace tp {
namespace {

constexpr int BLOCK = 16;  // rows of a head's state whose sums are taken together

// One token on `rows` <= 16 rows of a head's state: state = round(decay state + (dt x) B), y = state C + skip x, the state of y
// before it is rounded.
template <class T, class S>
void advance(S* state, int rows, int size, float decay, float dt, float skip, const T* x, const T* b, const T* c, float* y) {
    v16 sums[BLOCK], values = load_some(x, rows);
    float scaled[BLOCK];
    store(scaled, values * splat(dt));
    for (int r = 0; r < rows; ++r) {
        v16 total = splat(0), input = splat(scaled[r]), keep = splat(decay);
        S* row = state + int64_t(r) * size;
        for (int i = 0; i < size; i += 16) {
            int n = size - i;
            v16 s = fma(input, load_some(b + i, n), load_some(row + i, n) * keep);
            total = fma(s, load_some(c + i, n), total);
            store_some(row + i, s, n);
        }
        sums[r] = total;
    }
    for (int r = rows; r < BLOCK; ++r) sums[r] = splat(0);
    store_some(y, fma(values, splat(skip), row_sums(sums)), rows);
}

// Tokens [from, to) of the packed axis on rows [first, first + rows) of one head.
template <class T, class S>
void recur(const Mamba2& layer, int head, int first, int rows, int64_t from, int64_t to, const T* mixed, const T* dt, int64_t ldt,
           S* state, float* y) {
    int group = head / (layer.heads / layer.groups), column = head * layer.head_dim + first;
    for (int64_t t = from; t < to; ++t) {
        const T* x = mixed + t * layer.channels();
        const T* b = x + layer.inner() + group * layer.state_size;
        float size = softplus(to_float(dt[t * ldt + head]) + layer.dt_bias[head]);
        size = size < layer.dt_least ? layer.dt_least : size > layer.dt_most ? layer.dt_most : size;  // NaN stays
        advance(state, rows, layer.state_size, std::exp(size * layer.rate[head]), size, layer.skip[head], x + column, b,
                b + layer.groups * layer.state_size, y + t * layer.inner() + column);
    }
}

template <class T, class S>
void row_block(const Mamba2& layer, const Rows& rows, const SlotView& ssm, int row, int head, int first, const T* mixed, const T* dt,
               int64_t ldt, float* y) {
    int n = std::min(BLOCK, layer.head_dim - first);
    int64_t at = (int64_t(head) * layer.head_dim + first) * layer.state_size;
    S* state = reinterpret_cast<S*>(ssm.at(rows.slots[row])) + at;
    int64_t from = rows.offsets[row], to = rows.offsets[row + 1];
    if (int mark = rows.checkpoint_offsets[row]) {
        recur<T, S>(layer, head, first, n, from, from + mark, mixed, dt, ldt, state, y);
        S* copy = reinterpret_cast<S*>(ssm.at(rows.checkpoint_slots[row])) + at;
        memcpy(copy, state, sizeof(S) * size_t(n) * size_t(layer.state_size));
        from += mark;
    }
    recur<T, S>(layer, head, first, n, from, to, mixed, dt, ldt, state, y);
}

}  // namespace

void mamba2_scan(const Mamba2& layer, const Rows& rows, const SlotView& ssm, const void* mixed, const void* dt, int64_t ldt, float* y) {
    // A long row is cut finely, for balance; a step of many short rows takes whole heads.
    int span = rows.tokens > 4 * rows.count ? BLOCK : layer.head_dim;
    int spans = (layer.head_dim + span - 1) / span;
    with_type(layer.dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        with_type(ssm.dtype, [&](auto* s) {
            using S = std::remove_pointer_t<decltype(s)>;
            for_each(rows.count * layer.heads * spans, [&](int task) {
                int head = task / spans % layer.heads, row = task / spans / layer.heads, begin = task % spans * span;
                for (int first = begin; first < std::min(layer.head_dim, begin + span); first += BLOCK)
                    row_block<T, S>(layer, rows, ssm, row, head, first, static_cast<const T*>(mixed), static_cast<const T*>(dt), ldt, y);
            });
        });
    });
}

}  // namespace tp
