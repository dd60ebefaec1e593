// Gated delta rule layer between its projections: causal convolution, token-recurrent rule, gated norm.
#pragma once
#include "conv.h"

namespace tp {

struct Gdn {
    int key_heads, value_heads, key_dim, value_dim, kernel;
    float eps;                 // of the gated norm
    Dtype dtype;               // of activations
    const float* conv_weight;  // [kernel][channels]
    const float* decay_rate;   // [value_heads], -exp(A_log)
    const float* dt_bias;      // [value_heads]
    const float* norm_weight;  // [value_dim]

    int channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    int values() const { return value_heads * value_dim; }
    Conv conv() const { return {channels(), kernel, dtype, conv_weight, nullptr, true}; }
};

// proj: [tokens, ld] of dtype, columns q | k | v (channels), z (values), b (value_heads), a (value_heads).
// out: [tokens, values] of dtype, contiguous: the input of the output projection.
// conv: [channels, kernel - 1] a slot; ssm: [value_heads, value_dim, key_dim] a slot; both read and written in place.
void gdn(const Gdn& layer, const Rows& rows, const SlotView& conv, const SlotView& ssm, const void* proj, int64_t ld, void* out);

// o [tokens, values] of dtype from mixed [tokens, channels] (q | k | v after the convolution); b, a: [tokens, ..] ld apart.
void delta_rule(const Gdn& layer, const Rows& rows, const SlotView& ssm, const void* mixed, const void* b, const void* a,
                int64_t ld, void* o);

}  // namespace tp
