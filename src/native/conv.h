// Causal depthwise convolution whose window lives in a state slot.
#pragma once
#include "step.h"

namespace tp {

struct Conv {
    int channels, kernel;  // kernel: 2 to 8 taps
    Dtype dtype;           // of activations
    const float* weight;   // [kernel][channels]
    const float* bias;     // [channels] or null
    bool silu;             // y = silu(round(conv)), else round(conv)
    bool by_tap = false;   // a slot's window is [kernel - 1, channels], not [channels, kernel - 1]
};

// y [tokens, channels] of dtype, contiguous; x: [tokens, ldx]; window: a part of every slot, read and written in place.
void causal_conv(const Conv& layer, const Rows& rows, const SlotView& window, const void* x, int64_t ldx, void* y);

}  // namespace tp
