// Arguments of the fused ops: plain data, the same for the CUDA kernels and their CPU twins (criticalkv-fused-cpu.h).
//
// Strides are in bytes. Pointers are to device memory for the kernels and to host memory for the twins. Nothing here is
// checked by the ops themselves: call the `supports` function of an op first (criticalkv-supports.h).
#pragma once

#include <cstdint>

namespace criticalkv {

enum class row_type : int32_t { F32, F16, BF16, Q8_0, Q4_0 };

// K or V of a cache: row i holds entry i of all KV heads side by side, each head_size numbers.
struct cache_rows {
    const void * data;
    int64_t      stride;
    int32_t      head_size;
    row_type     type;
};

// Observed attention: what the window's queries look at.
//   logit[h][t][i] = q[h][t] . k[i] * scale, or softcap * tanh(that / softcap), + mask[t][i]
//   p[h][t][i]     = softmax over all n entries, with sinks[h] as one more logit
//   mean: out[i]   = average pool over entries of the mean of p over t and the query heads h of a KV head
//   max:  out[i]   = maximum over t and h of the average pool of p
// The pool has stride 1 and sees the first n_before entries only; zero padding counts in its divisor.
struct attention_args {
    cache_rows      k;
    int64_t         n;         // entries
    int64_t         n_before;  // of these, before the window: the ones that get a score
    int32_t         n_head;    // query heads, a multiple of n_head_kv
    int32_t         n_head_kv;
    int32_t         m;     // window queries
    int32_t         pool;  // odd
    bool            max;   // and not the mean
    float           scale;
    float           softcap;  // 0: none
    const float *   queries;  // ring of rows [n_head * head_size]
    int64_t         query_stride;
    const int32_t * query_rows;  // [m] rows of the ring
    const float *   mask;        // [m][n] 0 or -inf
    int64_t         mask_stride;
    const float *   sinks;      // [n_head] or nullptr
    float *         out;        // [n_head_kv][n_before]
    float *         workspace;  // attention_workspace() bytes; the CPU twin needs none
};

// Rows of one tensor that move: row i of a head of the target is row slots[head][i] of the source.
struct moved_rows {
    const void * from;
    void *       to;  // `from` itself with the same stride, or memory apart from it
    int64_t      from_stride;
    int64_t      to_stride;
    int64_t      head_bytes;  // of one head in a row; the heads lie side by side
};

struct compaction_args {
    moved_rows      k;
    moved_rows      v;
    const int32_t * slots;  // [n_head_kv][n_keep], ascending in each head
    int64_t         n_keep;
    int32_t         n_head_kv;
};

// out[head][i] = mean over the per_head Gram matrices G of a KV head of sqrt(v[i]^T G v[i]). What rounding makes negative is
// zero, and so is what is not a number, as in ggml's relu.
struct gram_args {
    cache_rows    v;
    int64_t       n;
    int32_t       n_head_kv;
    int32_t       per_head;
    const float * gram;  // [n_head_kv * per_head] symmetric matrices [head_size][head_size]
    int64_t       gram_row_stride;
    int64_t       gram_stride;  // from matrix to matrix
    float *       out;          // [n_head_kv][n]
};

// out[head][i] = mean over the `group` query heads h of a KV head of |v[i] W_h|_1.
// Values are rounded to f16 after multiplication by a power of two that brings the largest of an entry to [1, 2); that is
// taken back from the result. So neither large nor tiny values leave the range of f16.
struct l1_args {
    cache_rows   v;
    int64_t      n;
    int32_t      n_head_kv;
    int32_t      group;
    const void * w;  // f16, row h * head_size + j: the n_embd outputs of input j of query head h
    int64_t      w_stride;
    int64_t      n_embd;
    float *      out;  // [n_head_kv][n]
};

}  // namespace criticalkv
