// Mixture of experts: router, chosen experts in ascending order, shared expert.
#pragma once
#include <vector>

#include "linear.h"

namespace tp {

struct Moe {
    const Linear* router;                       // -> experts
    std::vector<const Linear*> gate_up, down;   // an expert each: -> 2 * intermediate, -> hidden
    const Linear *shared_gate_up, *shared_down; // null without a shared expert
    const Linear* shared_gate;                  // -> 1
    int top_k;
    bool normalise;                             // chosen weights sum to 1
};

// y[i] = round(residual[i] + moe(x[i])); x, y, residual: [rows, hidden] of the layers' dtype, contiguous; y may be residual.
void moe(const Moe& layer, const void* x, int rows, void* y, const void* residual);

}  // namespace tp
