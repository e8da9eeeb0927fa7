// Elastic memory: the rows behind the K and V tensors of one layer.
//
// llama.cpp makes the tensors of a cache with n_ctx rows and never resizes them. Here they keep that shape, so no graph
// and no view changes, but their data is a buffer with room for `capacity` rows. Attention reads the first n_kv
// rows, and the store sees to it that n_kv never exceeds the capacity; what else reads rows (states, scores) checks first
// that the cells in use are within it. A graph that was built before a change holds old addresses:
// `store::memory_version` tells it not to be used again.
#pragma once

#include "ggml-cpp.h"

#include <cstdint>

namespace criticalkv {

struct layer;

struct kv_rows {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    ggml_tensor *           k        = nullptr;  // [n_embd_k * n_head_kv, capacity]
    ggml_tensor *           v        = nullptr;  // [n_embd_v * n_head_kv, capacity]
    int64_t                 capacity = 0;

    int64_t bytes() const { return buf ? (int64_t) ggml_backend_buffer_get_size(buf.get()) : 0; }
};

// A buffer for all tensors of a context, nullptr without memory for it; fail_allocation lets the k-th of them fail.
ggml_backend_buffer_ptr allocate_tensors(ggml_context * ctx, ggml_backend_buffer_type_t buft);
void                    fail_allocation(int32_t k);

// Zeroed rows for one layer; zeroed, because attention multiplies the rows of empty slots by 0, and what the memory held
// before may be NaN. (Entries that were there once and are no longer may stay: they are finite.)
// Throws error(CRITICALKV_ERR_MEMORY) with the number of bytes asked for.
kv_rows allocate_rows(const layer & l, int64_t capacity);

// The first n rows of one layer's K or V move from `from` to `to`.
void copy_rows(ggml_tensor * from, ggml_tensor * to, int64_t n);

// The layer's tensors get these rows; the ones it had are freed.
void adopt_rows(layer & l, kv_rows && rows);

// After `bytes` were freed on the host: hands them to the system. glibc keeps freed blocks of up to 32 MiB to itself.
void return_freed_memory(int64_t bytes);

}  // namespace criticalkv
