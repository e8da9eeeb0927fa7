// What the kernels take: pure functions of the arguments, to be asked before a launch. Each returns the reason why not, or
// nullptr. What is refused here the ggml graphs still do.
#pragma once

#include "criticalkv-args.h"

#include <initializer_list>

namespace criticalkv {

constexpr int32_t MAX_POOL = 33;  // so that at least half of a tile of 64 entries gets a score

inline int64_t head_bytes(row_type type, int64_t d) {
    switch (type) {
        case row_type::F32:
            return d * 4;
        case row_type::F16:
        case row_type::BF16:
            return d * 2;
        case row_type::Q8_0:
            return d / 32 * 34;
        case row_type::Q4_0:
            return d / 32 * 18;
    }
    return 0;
}

// Four numbers are read at once; a block of a quantized row starts with a 2-byte scale.
inline int64_t row_alignment(row_type type) {
    switch (type) {
        case row_type::F32:
            return 16;
        case row_type::F16:
        case row_type::BF16:
            return 8;
        default:
            return 2;
    }
}

inline bool is_aligned(const void * data, int64_t stride, int64_t to) {
    return (uint64_t) data % (uint64_t) to == 0 && stride % to == 0;
}

inline const char * refuse_rows(const cache_rows & rows) {
    if (rows.type < row_type::F32 || rows.type > row_type::Q4_0) {
        return "the cache type has no kernel: f32, f16, bf16, q8_0 and q4_0 have";
    }
    const bool quantized = rows.type == row_type::Q8_0 || rows.type == row_type::Q4_0;
    if (rows.head_size < 1 || rows.head_size % (quantized ? 32 : 4) != 0) {
        return "the head size is not a multiple of 4, or of 32 with a quantized cache";
    }
    if (!is_aligned(rows.data, rows.stride, row_alignment(rows.type))) {
        return "the rows of the cache are not aligned";
    }
    return nullptr;
}

inline const char * refuse_heads(int32_t n_head_kv) {
    return n_head_kv >= 1 && n_head_kv <= 65535 ? nullptr : "the number of KV heads is not in 1 to 65535";
}

inline const char * refuse(const attention_args & p) {
    if (const char * reason = refuse_rows(p.k)) {
        return reason;
    }
    if (const char * reason = refuse_heads(p.n_head_kv)) {
        return reason;
    }
    if (p.n_head % p.n_head_kv != 0 || p.m < 1 || p.n_before < 1 || p.n_before > p.n) {
        return "sizes do not fit together";
    }
    if (p.pool < 1 || p.pool % 2 == 0 || p.pool > MAX_POOL) {
        return "the pool is not an odd number from 1 to 33";
    }
    if (!is_aligned(p.queries, p.query_stride, 16) || !is_aligned(p.mask, p.mask_stride, 4)) {
        return "queries or mask are not aligned";
    }
    return nullptr;
}

inline const char * refuse(const compaction_args & p) {
    for (const moved_rows & rows : { p.k, p.v }) {
        if (rows.from == rows.to && rows.from_stride != rows.to_stride) {
            return "rows that stay in their memory cannot get another stride";
        }
        if (rows.head_bytes % 2 != 0 || !is_aligned(rows.from, rows.from_stride, 2) ||
            !is_aligned(rows.to, rows.to_stride, 2)) {
            return "rows are not aligned to 2 bytes";
        }
    }
    return refuse_heads(p.n_head_kv);
}

inline const char * refuse(const gram_args & p) {
    if (const char * reason = refuse_rows(p.v)) {
        return reason;
    }
    if (p.n < 1 || p.per_head < 1 || !is_aligned(p.gram, p.gram_row_stride | p.gram_stride, 16)) {
        return "sizes do not fit together, or the Gram matrices are not aligned";
    }
    return refuse_heads(p.n_head_kv);
}

inline const char * refuse(const l1_args & p) {
    if (const char * reason = refuse_rows(p.v)) {
        return reason;
    }
    const int32_t d = p.v.head_size;
    if (d != 64 && d != 80 && d != 96 && d != 128 && d != 256) {
        return "the head size is not 64, 80, 96, 128 or 256";
    }
    if (p.n < 1 || p.group < 1 || p.n_embd < 8 || p.n_embd % 8 != 0 || !is_aligned(p.w, p.w_stride, 16)) {
        return "sizes do not fit together, or W_O is not aligned";
    }
    return refuse_heads(p.n_head_kv);
}

template <typename Args> bool supports(const Args & p) {
    return refuse(p) == nullptr;
}

}  // namespace criticalkv
