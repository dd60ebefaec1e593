// Gated delta rule layer between its projections: causal convolution, token-recurrent rule, gated norm.
#pragma once
#include "step.h"

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
};

// proj: [tokens, ld] of dtype, columns q | k | v (channels), z (values), b (value_heads), a (value_heads).
// out: [tokens, values] of dtype, contiguous: the input of the output projection.
// conv: [channels, kernel - 1] a slot; ssm: [value_heads, value_dim, key_dim] a slot; both read and written in place.
void gdn(const Gdn& layer, const Rows& rows, const SlotView& conv, const SlotView& ssm, const void* proj, int64_t ld, void* out);

// Depthwise causal convolution. Weight of channel c and tap j (0: oldest input) at weight[c * channel_step + j * tap_step].
struct Conv {
    int channels, kernel;
    const float *weight, *bias;  // bias: [channels] or null
    int64_t channel_step, tap_step;
    bool round_sum;              // to the activations' dtype before silu, as a torch convolution of that dtype does
    Dtype dtype;                 // of activations
};

// y = silu(conv(x)): [tokens, channels], rows ldx and ldy apart.
void causal_conv(const Conv& layer, const Rows& rows, const SlotView& conv, const void* x, int64_t ldx, void* y, int64_t ldy);

// What the rule reads, rows apart by the leading dimensions: mixed (q | k | v after the convolution), b and a [value_heads].
struct RuleInput {
    const void *mixed, *b, *a;
    int64_t ldm, ldb, lda;
};

// o [tokens, values] of dtype, contiguous.
void delta_rule(const Gdn& layer, const Rows& rows, const SlotView& ssm, const RuleInput& in, void* o);

}  // namespace tp
