// Gated DeltaNet layer between its projections: causal convolution, token-recurrent rule, gated norm.
#pragma once
#include "conv.h"
#include "delta.h"

namespace tp {

struct Gdn {
    DeltaRule rule;
    int kernel;
    float eps;                 // of the gated norm
    const float* conv_weight;  // [kernel][channels]
    const float* norm_weight;  // [value_dim]
};

// proj: [tokens, ld] of dtype, columns q | k | v (channels), z (values), b (value_heads), a (value_heads).
// out: [tokens, values] of dtype, contiguous: the input of the output projection.
// conv: [channels, kernel - 1] a slot; ssm as in delta.h; both read and written in place.
void gdn(const Gdn& layer, const Rows& rows, const SlotView& conv, const SlotView& ssm, const void* proj, int64_t ld, void* out);

}  // namespace tp
