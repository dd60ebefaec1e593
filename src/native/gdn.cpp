#include "gdn.h"

#include "elementwise.h"
#include "pool.h"

namespace tp {

void gdn(const Gdn& layer, const Rows& rows, const SlotView& conv, const SlotView& ssm, const void* proj, int64_t ld, void* out) {
    const DeltaRule& rule = layer.rule;
    int item = item_bytes(rule.dtype), channels = rule.channels(), values = rule.values();
    void* mixed = scratch(0, int64_t(rows.tokens) * channels * item);
    const char* z = static_cast<const char*>(proj) + int64_t(channels) * item;
    const char* b = z + int64_t(values) * item;
    const char* a = b + int64_t(rule.value_heads) * item;
    causal_conv({channels, layer.kernel, rule.dtype, layer.conv_weight, nullptr, true}, rows, conv, proj, ld, mixed);
    delta_rule(rule, rows, ssm, mixed, b, ld, a, ld, out);
    gated_rms_norm(out, values, z, ld, out, values, rows.tokens, rule.value_heads, rule.value_dim, layer.norm_weight, layer.eps,
                   rule.dtype);
}

}  // namespace tp
