// Mixture of experts: router, chosen experts in ascending order, shared expert.
#pragma once
#include <vector>

#include "linear.h"

namespace tp {

// How experts are chosen from the router's logits.
struct Routing {
    int top_k;
    bool sigmoid;          // scores are sigmoid(logit) each, not softmax
    const float* bias;     // [experts], added to the scores for choosing only; or null
    int groups, top_groups;  // experts in equal groups; only those in the top_groups with the largest sum of their two best count
    bool normalise;        // chosen weights are divided by their sum + epsilon
    float epsilon, scale;  // scale: factor on the weights, last
};

struct Moe {
    const Linear* router;                       // -> experts; of the experts' dtype, or float32
    std::vector<const Linear*> gate_up, down;   // an expert each: -> 2 * intermediate (or 1 *, squared_relu), -> hidden (or latent)
    const Linear *shared_gate_up, *shared_down; // null without a shared expert
    const Linear* shared_gate;                  // -> 1; null: the shared expert counts whole
    const Linear *narrow, *widen;               // experts get narrow(x), and widen makes hidden of their sum; or null
    Routing routing;
    bool squared_relu;                          // down(relu(up)^2) instead of down(silu(gate) * up)
    float limit;                                // of gate and up, as silu_mul's
};

// y[i] = round(residual[i] + moe(x[i])); x, y, residual: [rows, hidden] of the experts' dtype, contiguous; y may be residual.
void moe(const Moe& layer, const void* x, int rows, void* y, const void* residual);

}  // namespace tp
