// Gated delta rule, token by token: what Gated DeltaNet (a decay a head) and Kimi Delta Attention (one a channel of the keys) share.
#pragma once
#include "step.h"

namespace tp {

struct DeltaRule {
    int key_heads, value_heads, key_dim, value_dim;
    Dtype dtype;              // of activations
    const float* rate;        // [value_heads], exp(A_log)
    const float* dt_bias;     // [value_heads]; by_channel [value_heads, key_dim]
    float beta_scale = 1;     // factor on the strength of an update
    bool by_channel = false;  // a decay for every channel of the keys; key heads and value heads are then as many
    float lower_bound = NAN;  // by_channel, of a decay's logarithm: bound sigmoid(rate x) instead of -rate softplus(x); NaN: none

    int channels() const { return 2 * key_heads * key_dim + values(); }
    int values() const { return value_heads * value_dim; }
};

// o [tokens, values] of dtype from mixed [tokens, channels] (q | k | v after the convolution); b: [tokens, value_heads], ldb apart;
// a: [tokens, value_heads], or by_channel [tokens, value_heads * key_dim], lda apart.
// ssm: [value_heads, value_dim, key_dim] a slot, read and written in place.
void delta_rule(const DeltaRule& rule, const Rows& rows, const SlotView& ssm, const void* mixed, const void* b, int64_t ldb,
                const void* a, int64_t lda, void* o);

}  // namespace tp
