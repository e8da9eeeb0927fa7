// Elastic memory: the rows behind the K and V tensors of one layer.
//
// llama.cpp makes the tensors of a cache with n_ctx rows and never resizes them. Here they keep that shape, so no graph
// and no view changes, but their data is a buffer with room for `capacity` rows. Attention reads the first n_kv
// rows, and the store sees to it that n_kv never exceeds the capacity; what else reads rows (states, scores) checks first
// that the cells in use are within it. A graph that was built before a change holds old addresses:
// `store::memory_version` tells it not to be used again.
//
// Uniform rows hold one entry of every KV head. Ragged rows hold one entry of one head: each head has its `base`, the entries
// before the first slot, as many as it was left with, and then as many slots as the others. So the cells of the cache
// tell of the slots, which are the same for all heads, and nothing of the base, which every later query sees.
#pragma once

#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

namespace criticalkv {

struct layer;

// Entries [first, first + n) of the KV heads [head, head + heads); of ragged rows, one head.
struct head_range {
    int64_t head;
    int64_t heads;
    int64_t first;
    int64_t n;
};

struct kv_rows {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    ggml_tensor *           k = nullptr;   // [n_embd_k * n_head_kv, capacity], ragged: [n_embd_k, rows of all heads]
    ggml_tensor *           v = nullptr;   // the same of values
    int64_t                 capacity = 0;  // slots

    std::vector<int64_t> base;  // [n_head_kv] entries before the slots; empty: uniform rows

    int64_t bytes() const { return buf ? (int64_t) ggml_backend_buffer_get_size(buf.get()) : 0; }

    bool is_ragged() const { return !base.empty(); }

    int64_t base_of(int64_t head) const { return is_ragged() ? base[head] : 0; }

    int64_t first_row(int64_t head) const;  // of a head, if ragged
};

// What rows hold there, as a view: [n_embd_k or n_embd_v, n, heads].
ggml_tensor * key_view(ggml_context * ctx, const layer & l, const kv_rows & rows, const head_range & of);
ggml_tensor * value_view(ggml_context * ctx, const layer & l, const kv_rows & rows, const head_range & of);

// A buffer for all tensors of a context, nullptr without memory for it; fail_allocation lets the k-th of them fail.
ggml_backend_buffer_ptr allocate_tensors(ggml_context * ctx, ggml_backend_buffer_type_t buft);
void                    fail_allocation(int32_t k);

// Zeroed rows for one layer; zeroed, because attention multiplies the rows of empty slots by 0, and what the memory held
// before may be NaN. (Entries that were there once and are no longer may stay: they are finite.)
// Throws error(CRITICALKV_ERR_MEMORY) with the number of bytes asked for.
kv_rows allocate_rows(const layer & l, int64_t capacity, std::vector<int64_t> base = {});

// The first n slots, and what comes before them, are copied to rows with the same base.
void copy_rows(const layer & l, const kv_rows & from, kv_rows & to, int64_t n);

// Ragged rows become uniform ones of no entries, in the same memory.
void make_uniform(layer & l);

// The layer's tensors get these rows; the ones it had are freed.
void adopt_rows(layer & l, kv_rows && rows);

// After `bytes` were freed on the host: hands them to the system. glibc keeps freed blocks of up to 32 MiB to itself.
void return_freed_memory(int64_t bytes);

}  // namespace criticalkv
