#include "kda.h"

#include "elementwise.h"
#include "pool.h"

namespace tp {

void kda(const Kda& layer, const Rows& rows, const SlotView& conv, const SlotView& ssm, const KdaInputs& in, void* out) {
    const DeltaRule& rule = layer.rule;
    int item = item_bytes(rule.dtype), channels = rule.channels(), values = rule.values();
    void* mixed = scratch(0, int64_t(rows.tokens) * channels * item);
    const char* b = static_cast<const char*>(in.opened) + int64_t(channels) * item;
    causal_conv({channels, layer.kernel, rule.dtype, layer.conv_weight, nullptr, true, true}, rows, conv, in.opened, in.ld, mixed);
    delta_rule(rule, rows, ssm, mixed, b, in.ld, in.decay, in.ldd, out);
    sigmoid_gated_rms_norm(out, values, in.gate, in.ldg, out, values, rows.tokens, rule.value_heads, rule.value_dim,
                           layer.norm_weight, layer.eps, rule.dtype);
}

}  // namespace tp
