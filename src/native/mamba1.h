// Mamba1 layer between its projections: step sizes, token-recurrent scan of a state per channel, gate. The convolution is a piece of its own.
#pragma once
#include "step.h"

namespace tp {

struct Mamba1 {
    int channels, state_size;
    Dtype dtype;           // of activations
    const float* rate;     // [channels][state_size], -exp(A_log)
    const float* dt_bias;  // [channels]
    const float* skip;     // [channels], D
};

// [tokens, ..] of the layer's dtype, rows ld elements apart.
struct Columns {
    const void* at;
    int64_t ld;
};

// x: after the convolution [tokens, channels]; dt: before its bias [tokens, channels]; b, c: [tokens, state_size]; gate: [tokens, channels].
struct Mamba1Inputs {
    Columns x, dt, b, c, gate;
};

// y [tokens, channels] of dtype, contiguous: the scan times silu(gate), rounded once. ssm: [channels, state_size] a slot, read and
// written in place.
void mamba1_scan(const Mamba1& layer, const Rows& rows, const SlotView& ssm, const Mamba1Inputs& in, void* y);

}  // namespace tp
