#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "gdn.h"
#include "pool.h"

namespace tp {
namespace {

constexpr int MAX_KERNEL = 8;
constexpr int TASK_CHANNELS = 128;

// The window of sixteen channels, oldest input first: slot layout is [channels, kernel - 1].
template <class W>
inline void load_window(const W* slot, int taps, int n, v16* window) {
    for (int j = 0; j < taps; ++j) {
        window[j] = splat(0);
        for (int c = 0; c < n; ++c) window[j][c] = to_float(slot[c * taps + j]);
    }
}
template <class W>
inline void save_window(W* slot, int taps, int n, const v16* window) {
    for (int j = 0; j < taps; ++j)
        for (int c = 0; c < n; ++c) from_float(slot[c * taps + j], window[j][c]);
}

// Weights of one tap, sixteen channels from c on.
inline v16 taps_at(const Conv& layer, int j, int c, int n) {
    const float* w = layer.weight + c * layer.channel_step + j * layer.tap_step;
    if (layer.channel_step == 1) return load_some(w, n);
    v16 v = splat(0);
    for (int i = 0; i < n; ++i) v[i] = w[i * layer.channel_step];
    return v;
}

// One row, sixteen channels from c on. The inputs are rounded to the window's dtype first, so that a token sees the same
// neighbours whether they come from this step or from the slot.
template <class T, class W>
void convolve(const Conv& layer, const Rows& rows, const SlotView& conv, int row, int c, const T* x, int64_t ldx, T* y,
              int64_t ldy) {
    int taps = layer.kernel - 1, n = std::min(16, layer.channels - c);
    v16 window[MAX_KERNEL], weight[MAX_KERNEL];
    for (int j = 0; j <= taps; ++j) weight[j] = taps_at(layer, j, c, n);
    v16 bias = layer.bias ? load_some(layer.bias + c, n) : splat(0);
    W* slot = reinterpret_cast<W*>(conv.at(rows.slots[row])) + int64_t(c) * taps;
    load_window(slot, taps, n, window);
    int mark = rows.checkpoint_offsets[row];
    for (int t = 0; t < rows.length(row); ++t) {
        int64_t token = rows.offsets[row] + t;
        window[taps] = rounded<W>(load_some(x + token * ldx + c, n));
        v16 total = window[0] * weight[0];
        for (int j = 1; j <= taps; ++j) total = fma(window[j], weight[j], total);
        if (layer.bias) total = total + bias;
        store_some(y + token * ldy + c, silu(layer.round_sum ? rounded<T>(total) : total), n);
        for (int j = 0; j < taps; ++j) window[j] = window[j + 1];
        if (t + 1 == mark)
            save_window(reinterpret_cast<W*>(conv.at(rows.checkpoint_slots[row])) + int64_t(c) * taps, taps, n, window);
    }
    save_window(slot, taps, n, window);
}

}  // namespace

void causal_conv(const Conv& layer, const Rows& rows, const SlotView& conv, const void* x, int64_t ldx, void* y, int64_t ldy) {
    if (layer.kernel < 2 || layer.kernel > MAX_KERNEL) throw std::invalid_argument("the convolution's kernel must be 2 to 8");
    int blocks = (layer.channels + TASK_CHANNELS - 1) / TASK_CHANNELS;
    with_type(layer.dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        with_type(conv.dtype, [&](auto* w) {
            using W = std::remove_pointer_t<decltype(w)>;
            for_each(rows.count * blocks, [&](int task) {
                int first = task % blocks * TASK_CHANNELS, last = std::min(layer.channels, first + TASK_CHANNELS);
                for (int c = first; c < last; c += 16)
                    convolve<T, W>(layer, rows, conv, task / blocks, c, static_cast<const T*>(x), ldx, static_cast<T*>(y), ldy);
            });
        });
    });
}

}  // namespace tp
