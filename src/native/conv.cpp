#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "conv.h"
#include "pool.h"

namespace tp {
namespace {

constexpr int MAX_KERNEL = 8;
constexpr int TASK_CHANNELS = 128;

// A slot holds [channels, taps]: sixteen channels of three taps are 48 values in three vectors. Tap J of channel c is value
// 3 c + J: taken from the first two vectors, then from the third; and back.
template <int J>
constexpr int32_t from_two(int c) { return 3 * c + J < 32 ? 3 * c + J : 0; }
template <int J>
constexpr int32_t from_third(int c) { return 3 * c + J < 32 ? c : 3 * c + J - 16; }
template <int J>
inline v16 tap_of(v16 a, v16 b, v16 c) {
    v16 r = __builtin_shuffle(a, b, i16x32{TP_LANES(from_two<J>)});
    return __builtin_shuffle(r, c, i16x32{TP_LANES(from_third<J>)});
}
template <int O>
constexpr int32_t of_two(int l) { return (16 * O + l) % 3 == 0 ? (16 * O + l) / 3 : (16 * O + l) % 3 == 1 ? 16 + (16 * O + l) / 3 : 0; }
template <int O>
constexpr int32_t of_third(int l) { return (16 * O + l) % 3 < 2 ? l : 16 + (16 * O + l) / 3; }
template <int O>
inline v16 vector_of(const v16* window) {
    v16 r = __builtin_shuffle(window[0], window[1], i16x32{TP_LANES(of_two<O>)});
    return __builtin_shuffle(r, window[2], i16x32{TP_LANES(of_third<O>)});
}

// The window of n <= 16 channels from c on, oldest input first.
template <class W>
inline void load_window(const Conv& layer, const W* slot, int taps, int c, int n, v16* window) {
    if (layer.by_tap) {
        for (int j = 0; j < taps; ++j) window[j] = load_some(slot + int64_t(j) * layer.channels + c, n);
        return;
    }
    slot += int64_t(c) * taps;
    if (taps == 3 && n == 16) {
        v16 a = load(slot), b = load(slot + 16), c = load(slot + 32);
        window[0] = tap_of<0>(a, b, c), window[1] = tap_of<1>(a, b, c), window[2] = tap_of<2>(a, b, c);
        return;
    }
    for (int j = 0; j < taps; ++j) {
        window[j] = splat(0);
        for (int i = 0; i < n; ++i) window[j][i] = to_float(slot[i * taps + j]);
    }
}
template <class W>
inline void save_window(const Conv& layer, W* slot, int taps, int c, int n, const v16* window) {
    if (layer.by_tap) {
        for (int j = 0; j < taps; ++j) store_some(slot + int64_t(j) * layer.channels + c, window[j], n);
        return;
    }
    slot += int64_t(c) * taps;
    if (taps == 3 && n == 16) {
        store(slot, vector_of<0>(window)), store(slot + 16, vector_of<1>(window)), store(slot + 32, vector_of<2>(window));
        return;
    }
    for (int j = 0; j < taps; ++j)
        for (int i = 0; i < n; ++i) from_float(slot[i * taps + j], window[j][i]);
}

// One row, sixteen channels from c on. The inputs are rounded to the window's dtype first, so that a token sees the same
// neighbours whether they come from this step or from the slot. KERNEL: layer.kernel if known while compiling, else 0.
template <class T, class W, int KERNEL>
void convolve(const Conv& layer, const Rows& rows, const SlotView& conv, int row, int c, const T* x, int64_t ldx, T* y) {
    const int channels = layer.channels, taps = (KERNEL ? KERNEL : layer.kernel) - 1, n = std::min(16, channels - c);
    v16 window[MAX_KERNEL], weight[MAX_KERNEL];
    for (int j = 0; j <= taps; ++j) weight[j] = load_some(layer.weight + int64_t(j) * channels + c, n);
    W* slot = reinterpret_cast<W*>(conv.at(rows.slots[row]));
    load_window(layer, slot, taps, c, n, window);
    const v16 bias = layer.bias ? load_some(layer.bias + c, n) : splat(0);
    const int mark = rows.checkpoint_offsets[row], length = rows.length(row);
    for (int t = 0; t < length; ++t) {
        int64_t token = rows.offsets[row] + t;
        window[taps] = rounded<W>(load_some(x + token * ldx + c, n));
        v16 total = window[0] * weight[0];
#pragma GCC unroll 8
        for (int j = 1; j <= taps; ++j) total = fma(window[j], weight[j], total);
        if (layer.bias) total = total + bias;
        store_some(y + token * channels + c, layer.silu ? silu(rounded<T>(total)) : total, n);
#pragma GCC unroll 8
        for (int j = 0; j < taps; ++j) window[j] = window[j + 1];
        if (t + 1 == mark)
            save_window(layer, reinterpret_cast<W*>(conv.at(rows.checkpoint_slots[row])), taps, c, n, window);
    }
    save_window(layer, slot, taps, c, n, window);
}

}  // namespace

void causal_conv(const Conv& layer, const Rows& rows, const SlotView& conv, const void* x, int64_t ldx, void* y) {
    if (layer.kernel < 2 || layer.kernel > MAX_KERNEL) throw std::invalid_argument("the convolution's kernel must be 2 to 8");
    int blocks = (layer.channels + TASK_CHANNELS - 1) / TASK_CHANNELS;
    with_type(layer.dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        with_type(conv.dtype, [&](auto* w) {
            using W = std::remove_pointer_t<decltype(w)>;
            for_each(rows.count * blocks, [&](int task) {
                int first = task % blocks * TASK_CHANNELS, last = std::min(layer.channels, first + TASK_CHANNELS);
                const T* in = static_cast<const T*>(x);
                T* out = static_cast<T*>(y);
                for (int c = first; c < last; c += 16)
                    if (layer.kernel == 4) convolve<T, W, 4>(layer, rows, conv, task / blocks, c, in, ldx, out);
                    else convolve<T, W, 0>(layer, rows, conv, task / blocks, c, in, ldx, out);
            });
        });
    });
}

}  // namespace tp
