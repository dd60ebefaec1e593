#include "mamba1.h"

#include <algorithm>
#include <cstring>

#include "elementwise.h"
#include "pool.h"

namespace tp {
namespace {

constexpr int TASK_CHANNELS = 64;

// One token's part of a matrix.
template <class T>
const T* token_of(const Columns& columns, int64_t t) { return static_cast<const T*>(columns.at) + t * columns.ld; }

// One token on n <= 16 channels from `first` on: state = round(e^(dt rate) state + (dt x) B), y = (state C + skip x) silu(gate), the
// state of y before it is rounded. NV: vectors a state, 0 if state_size is not 16 * NV.
template <class T, class S, int NV>
inline void advance(const Mamba1& layer, const Mamba1Inputs& in, int64_t t, int first, int n, S* state, T* y) {
    const T *b = token_of<T>(in.b, t), *c = token_of<T>(in.c, t);
    const int size = NV ? 16 * NV : layer.state_size;
    v16 x = load_some(token_of<T>(in.x, t) + first, n);
    v16 dt = softplus(load_some(token_of<T>(in.dt, t) + first, n) + load_some(layer.dt_bias + first, n));
    float steps[16], driven[16];
    store(steps, dt), store(driven, dt * x);
    v16 sums[16];
    for (int r = 0; r < n; ++r) {
        const float* rate = layer.rate + int64_t(first + r) * size;
        S* row = state + int64_t(r) * size;
        v16 step = splat(steps[r]), input = splat(driven[r]), total = splat(0);
        for (int i = 0; i < size; i += 16) {
            int width = NV ? 16 : size - i;
            v16 kept = load_some(row + i, width) * exp(step * load_some(rate + i, width));
            v16 s = fma(input, load_some(b + i, width), kept);
            total = fma(s, load_some(c + i, width), total);
            store_some(row + i, s, width);
        }
        sums[r] = total;
    }
    for (int r = n; r < 16; ++r) sums[r] = splat(0);
    v16 out = fma(x, load_some(layer.skip + first, n), row_sums(sums));
    store_some(y + t * layer.channels + first, out * silu(load_some(token_of<T>(in.gate, t) + first, n)), n);
}

// One row, channels [begin, end): token by token, so that what is read of a token is read once.
template <class T, class S, int NV>
void scan_row(const Mamba1& layer, const Rows& rows, const SlotView& ssm, const Mamba1Inputs& in, int row, int begin, int end, T* y) {
    auto state_of = [&](int slot) { return reinterpret_cast<S*>(ssm.at(slot)) + int64_t(begin) * layer.state_size; };
    S* state = state_of(rows.slots[row]);
    const int mark = rows.checkpoint_offsets[row], length = rows.length(row);
    for (int t = 0; t < length; ++t) {
        for (int c = begin; c < end; c += 16)
            advance<T, S, NV>(layer, in, rows.offsets[row] + t, c, std::min(16, end - c),
                              state + int64_t(c - begin) * layer.state_size, y);
        if (t + 1 == mark)
            memcpy(state_of(rows.checkpoint_slots[row]), state, sizeof(S) * size_t(end - begin) * size_t(layer.state_size));
    }
}

}  // namespace

void mamba1_scan(const Mamba1& layer, const Rows& rows, const SlotView& ssm, const Mamba1Inputs& in, void* y) {
    int blocks = (layer.channels + TASK_CHANNELS - 1) / TASK_CHANNELS;
    with_type(layer.dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        with_type(ssm.dtype, [&](auto* s) {
            using S = std::remove_pointer_t<decltype(s)>;
            auto scan = layer.state_size == 16 ? scan_row<T, S, 1> : scan_row<T, S, 0>;
            for_each(rows.count * blocks, [&](int task) {
                int begin = task % blocks * TASK_CHANNELS;
                scan(layer, rows, ssm, in, task / blocks, begin, std::min(layer.channels, begin + TASK_CHANNELS), static_cast<T*>(y));
            });
        });
    });
}

}  // namespace tp
