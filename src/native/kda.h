// Kimi Delta Attention layer between its projections: causal convolution, token-recurrent rule, gated norm.
#pragma once
#include "conv.h"
#include "delta.h"

namespace tp {

struct Kda {
    DeltaRule rule;            // by_channel
    int kernel;
    float eps;                 // of the gated norm
    const float* conv_weight;  // [kernel][channels]
    const float* norm_weight;  // [value_dim]
};

// What the projections give, each of the rule's dtype with rows of its own length: q | k | v (channels) and b (heads) in `opened`,
// decay [tokens, heads * key_dim], gate [tokens, values].
struct KdaInputs {
    const void* opened;
    int64_t ld;
    const void* decay;
    int64_t ldd;
    const void* gate;
    int64_t ldg;
};

// out: [tokens, values] of dtype, contiguous: the input of the output projection.
// conv: [kernel - 1, channels] a slot (the other way round than Gated DeltaNet's); ssm as in delta.h; both read and written in place.
void kda(const Kda& layer, const Rows& rows, const SlotView& conv, const SlotView& ssm, const KdaInputs& in, void* out);

}  // namespace tp
