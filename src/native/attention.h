// Grouped-query attention over a paged cache.
#pragma once
#include "step.h"

namespace tp {

struct Attention {
    int heads, kv_heads, dim, rotary;  // rotary: leading elements of a head that are rotated, even
    float scale, eps;
    Dtype dtype;                       // of activations
    const float *query_scale, *key_scale;  // [dim] of the per-head norms
    const float* table;                // [positions][rotary]: cos of rotary / 2 frequencies, then sin
};

// proj: [tokens, ld] of dtype, columns: for each head query (dim) and gate (dim), then keys (kv_heads * dim), then values.
// Norms and rotates queries into q [tokens, heads, dim] of dtype, keys likewise into their pages, and stores the values.
void rotate_and_store(const Attention& layer, const Rows& rows, const KvView& kv, const void* proj, int64_t ld, void* q);

// Where the heads of a tensor lie (strides in elements) and the tables [positions, rotary / 2] that rotate them.
struct Rotation {
    int heads, rotary;
    int64_t token_stride, head_stride;
    const float *cosines, *sines;
};

// Rotates x in place; positions: [tokens].
void rotate(const Rotation& r, void* x, const int64_t* positions, int tokens, Dtype dtype);

// Stores keys and values [tokens, kv_heads * dim] of dtype, rows ldk and ldv apart, in their pages.
void write_kv(const Rows& rows, const KvView& kv, const void* keys, int64_t ldk, const void* values, int64_t ldv, Dtype dtype);

// Queries of dtype, token and head strides in elements; gate: where head 0's begins in the first row, heads 2 * dim and rows
// ldg apart, or null.
struct Queries {
    const void *q, *gate;
    int64_t token_stride, head_stride, ldg;
};

// out [tokens, heads * dim] of dtype: softmax(q . K * scale) V, with a gate round(that) * round(sigmoid(gate)); everything is
// read from the pages.
void attend(const Attention& layer, const Rows& rows, const KvView& kv, const Queries& in, void* out);

}  // namespace tp
