// Grouped-query attention over a paged cache.
#pragma once
#include "step.h"

namespace tp {

struct Attention {
    int heads, kv_heads, dim, rotary;  // rotary: leading elements of a head that are rotated, even
    float scale, eps;
    Dtype dtype;                       // of activations
    const float *query_scale, *key_scale;  // [dim] of the per-head norms; null: no norms
    const float* table;                // [positions][rotary]: cos of rotary / 2 frequencies, then sin
    bool gated;                        // queries come with gates

    int query_columns() const { return gated ? 2 * dim : dim; }  // of a head in proj
};

// proj: [tokens, ld] of dtype, columns: for each head query (dim) and, if gated, gate (dim), then keys (kv_heads * dim), then
// values.
// Norms and rotates queries into q [tokens, heads, dim] of dtype, keys likewise into their pages, and stores the values.
void rotate_and_store(const Attention& layer, const Rows& rows, const KvView& kv, const void* proj, int64_t ld, void* q);

// out [tokens, heads * dim] of dtype: round(softmax(q . K * scale) V), times round(sigmoid(gate)) if gated; everything is read from the pages.
void attend(const Attention& layer, const Rows& rows, const KvView& kv, const void* q, const void* proj, int64_t ld, void* out);

}  // namespace tp
