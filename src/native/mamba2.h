// Mamba2 layer between its projections: step sizes, token-recurrent scan. The convolution and the gated norm are pieces of their own.
#pragma once
#include "step.h"

namespace tp {

struct Mamba2 {
    int heads, head_dim, state_size, groups;
    Dtype dtype;           // of activations
    const float* rate;     // [heads], -exp(A_log)
    const float* dt_bias;  // [heads]
    const float* skip;     // [heads], D
    float dt_least, dt_most;

    int inner() const { return heads * head_dim; }
    int channels() const { return inner() + 2 * groups * state_size; }
};

// y [tokens, inner] of float32, unrounded, from mixed [tokens, channels] (x | B | C after the convolution) and dt [tokens, ..] of
// dtype, rows ldt elements apart. ssm: [heads, head_dim, state_size] a slot, read and written in place.
void mamba2_scan(const Mamba2& layer, const Rows& rows, const SlotView& ssm, const void* mixed, const void* dt, int64_t ldt, float* y);

}  // namespace tp
