// The fused ops as nodes of a ggml graph: GGML_OP_CUSTOM tensors whose op_params say, after ggml's own parameters of a custom
// op, which op it is and its numbers. All of a node's work follows from its op_params, shapes and addresses, which is what
// ggml-cuda compares before it launches a captured CUDA graph again.
//
// Sources:
//   attention   k rows [d, n, heads], queries [d * n_head, ring], rows of the ring I32 [m], mask F32 [n, m], sinks F32 [n_head]
//               or none; result F32 [n_before, heads]
//   compaction  k rows to [d, n_keep, heads], k rows from [d, n, heads], v rows from, slots I32 [n_keep, heads], v rows to;
//               result: a view of k rows to
//   Gram        v rows [d, n, heads], Gram matrices F32 [d, d, heads * per_head]; result F32 [n, heads]
//   L1          v rows [d, n, heads], W_O F16 [n_embd, d * n_head]; result F32 [n, heads]
// "Rows" are views of a cache as criticalkv::head_rows makes them: nb[1] from entry to entry, nb[2] from head to head.
#pragma once

#include "criticalkv-args.h"
#include "criticalkv-supports.h"
#include "ggml.h"

#include <cstring>

namespace criticalkv {

enum class fused_op : int32_t { ATTENTION = 1, COMPACTION, GRAM, L1 };

// ggml_custom_op_params of ggml-impl.h, which its backends read.
struct custom_params {
    ggml_custom_op_t fun;
    int              n_tasks;
    void *           userdata;
};

struct fused_params {
    uint32_t magic;
    fused_op op;
    int32_t  pool;     // of attention
    int32_t  max;      // of attention
    float    scale;    // of attention
    float    softcap;  // of attention
};

constexpr uint32_t FUSED_MAGIC = 0x464b5643;

constexpr int LEAST_CC_WMMA = 700;  // tensor cores

static_assert(sizeof(custom_params) + sizeof(fused_params) <= GGML_MAX_OP_PARAMS, "they share op_params");

// Of a node that is one of ours; of any other, op is no member of fused_op.
inline fused_params fused_params_of(const ggml_tensor * node) {
    fused_params p = {};
    if (node->op == GGML_OP_CUSTOM) {
        std::memcpy(&p, (const char *) node->op_params + sizeof(custom_params), sizeof(p));
    }
    return p.magic == FUSED_MAGIC ? p : fused_params{};
}

// False if there is no kernel for it.
inline bool row_type_of(ggml_type type, row_type & out) {
    switch (type) {
        case GGML_TYPE_F32:
            out = row_type::F32;
            return true;
        case GGML_TYPE_F16:
            out = row_type::F16;
            return true;
        case GGML_TYPE_BF16:
            out = row_type::BF16;
            return true;
        case GGML_TYPE_Q8_0:
            out = row_type::Q8_0;
            return true;
        case GGML_TYPE_Q4_0:
            out = row_type::Q4_0;
            return true;
        default:
            return false;
    }
}

inline cache_rows cache_rows_of(const ggml_tensor * t) {
    cache_rows rows = { t->data, (int64_t) t->nb[1], (int32_t) t->ne[0], row_type::F32 };
    row_type_of(t->type, rows.type);
    return rows;
}

// `workspace` is left to the caller.
inline attention_args attention_args_of(const ggml_tensor * node) {
    const fused_params  fused   = fused_params_of(node);
    const ggml_tensor * k       = node->src[0];
    const ggml_tensor * queries = node->src[1];
    const ggml_tensor * mask    = node->src[3];
    attention_args      p       = {};
    p.k                         = cache_rows_of(k);
    p.n                         = k->ne[1];
    p.n_before                  = node->ne[0];
    p.n_head                    = (int32_t) (queries->ne[0] / k->ne[0]);
    p.n_head_kv                 = (int32_t) k->ne[2];
    p.m                         = (int32_t) node->src[2]->ne[0];
    p.pool                      = fused.pool;
    p.max                       = fused.max != 0;
    p.scale                     = fused.scale;
    p.softcap                   = fused.softcap;
    p.queries                   = (const float *) queries->data;
    p.query_stride              = (int64_t) queries->nb[1];
    p.query_rows                = (const int32_t *) node->src[2]->data;
    p.mask                      = (const float *) mask->data;
    p.mask_stride               = (int64_t) mask->nb[1];
    p.sinks                     = node->src[4] != nullptr ? (const float *) node->src[4]->data : nullptr;
    p.out                       = (float *) node->data;
    return p;
}

inline moved_rows moved_rows_of(const ggml_tensor * from, const ggml_tensor * to) {
    return { from->data, to->data, (int64_t) from->nb[1], (int64_t) to->nb[1], (int64_t) from->nb[2] };
}

inline compaction_args compaction_args_of(const ggml_tensor * node) {
    const ggml_tensor * slots = node->src[3];
    compaction_args     p     = {};
    p.k                       = moved_rows_of(node->src[1], node->src[0]);
    p.v                       = moved_rows_of(node->src[2], node->src[4]);
    p.slots                   = (const int32_t *) slots->data;
    p.n_keep                  = slots->ne[0];
    p.n_head_kv               = (int32_t) slots->ne[1];
    return p;
}

inline gram_args gram_args_of(const ggml_tensor * node) {
    const ggml_tensor * v    = node->src[0];
    const ggml_tensor * gram = node->src[1];
    gram_args           p    = {};
    p.v                      = cache_rows_of(v);
    p.n                      = v->ne[1];
    p.n_head_kv              = (int32_t) v->ne[2];
    p.per_head               = (int32_t) (gram->ne[2] / v->ne[2]);
    p.gram                   = (const float *) gram->data;
    p.gram_row_stride        = (int64_t) gram->nb[1];
    p.gram_stride            = (int64_t) gram->nb[2];
    p.out                    = (float *) node->data;
    return p;
}

inline l1_args l1_args_of(const ggml_tensor * node) {
    const ggml_tensor * v = node->src[0];
    const ggml_tensor * w = node->src[1];
    l1_args             p = {};
    p.v                   = cache_rows_of(v);
    p.n                   = v->ne[1];
    p.n_head_kv           = (int32_t) v->ne[2];
    p.group               = (int32_t) (w->ne[1] / (v->ne[0] * v->ne[2]));
    p.w                   = w->data;
    p.w_stride            = (int64_t) w->nb[1];
    p.n_embd              = w->ne[0];
    p.out                 = (float *) node->data;
    return p;
}

// Whether there is a kernel for a node on a device of compute capability cc (100 * major + 10 * minor).
inline bool has_kernel(const ggml_tensor * node, int cc) {
    row_type type;
    switch (fused_params_of(node).op) {
        case fused_op::ATTENTION:
            return row_type_of(node->src[0]->type, type) && supports(attention_args_of(node));
        case fused_op::COMPACTION:
            return supports(compaction_args_of(node));
        case fused_op::GRAM:
            return row_type_of(node->src[0]->type, type) && supports(gram_args_of(node));
        case fused_op::L1:
            return cc >= LEAST_CC_WMMA && row_type_of(node->src[0]->type, type) && supports(l1_args_of(node));
    }
    return false;
}

}  // namespace criticalkv
