#include "criticalkv-memory.h"

#include "criticalkv-error.h"
#include "criticalkv-ragged.h"
#include "criticalkv-store.h"
#include "llama-context.h"
#include "llama-kv-cache.h"

#include <algorithm>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace criticalkv {

static constexpr int64_t TRIM_BYTES = 4 << 20;

static ggml_context_ptr tensor_context(size_t n_tensors) {
    ggml_init_params init = {};
    init.mem_size         = ggml_tensor_overhead() * n_tensors;
    init.no_alloc         = true;
    ggml_context_ptr ctx(ggml_init(init));
    if (!ctx) {
        throw error(CRITICALKV_ERR_MEMORY, "no memory on the host");
    }
    return ctx;
}

// For tests: this thread's allocations until one fails, 0: none shall.
static thread_local int32_t n_to_failure = 0;

void fail_allocation(int32_t k) {
    n_to_failure = k;
}

ggml_backend_buffer_ptr allocate_tensors(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    if (n_to_failure > 0 && --n_to_failure == 0) {
        return nullptr;
    }
    return ggml_backend_buffer_ptr(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
}

int64_t kv_rows::first_row(int64_t head) const {
    int64_t row = 0;
    for (int64_t i = 0; i < head; ++i) {
        row += base[i] + capacity;
    }
    return row;
}

static ggml_tensor * head_view(ggml_context * ctx, const kv_rows & rows, ggml_tensor * cache, int64_t d,
                               const head_range & of) {
    const size_t head_bytes = ggml_row_size(cache->type, d);
    const size_t offset     = rows.is_ragged() ? (size_t) rows.first_row(of.head) * cache->nb[1] : of.head * head_bytes;
    return ggml_view_3d(ctx, cache, d, of.n, of.heads, cache->nb[1], head_bytes, offset + of.first * cache->nb[1]);
}

ggml_tensor * key_view(ggml_context * ctx, const layer & l, const kv_rows & rows, const head_range & of) {
    return head_view(ctx, rows, rows.k, l.info.n_embd_k, of);
}

ggml_tensor * value_view(ggml_context * ctx, const layer & l, const kv_rows & rows, const head_range & of) {
    return head_view(ctx, rows, rows.v, l.info.n_embd_v, of);
}

// Attention on a device may read that many rows after a head's last (criticalkv-ragged.cpp).
static int64_t spare_rows(const layer & l) {
    return ggml_backend_buft_is_host(l.buft) ? 0 : RAGGED_PADDING;
}

kv_rows allocate_rows(const layer & l, int64_t capacity, std::vector<int64_t> base) {
    kv_rows r;
    r.capacity          = capacity;
    r.base              = std::move(base);
    const bool    split = r.is_ragged();
    const int64_t n     = split ? r.first_row(l.info.n_head_kv) + spare_rows(l) : capacity;
    r.ctx               = tensor_context(2);
    r.k                 = ggml_new_tensor_2d(r.ctx.get(), l.k->type, split ? l.info.n_embd_k : l.k->ne[0], n);
    r.v                 = ggml_new_tensor_2d(r.ctx.get(), l.v->type, split ? l.info.n_embd_v : l.v->ne[0], n);
    r.buf               = allocate_tensors(r.ctx.get(), l.buft);
    if (!r.buf) {
        const size_t bytes = ggml_nbytes(r.k) + ggml_nbytes(r.v);
        throw error(CRITICALKV_ERR_MEMORY, "no memory for " + std::to_string(capacity) +
                                               " entries per KV head of layer " + std::to_string(l.il) +
                                               ": asked for " + std::to_string(bytes) + " bytes");
    }
    ggml_backend_buffer_clear(r.buf.get(), 0);
    return r;
}

static void copy_range(ggml_tensor * from, int64_t from_row, ggml_tensor * to, int64_t to_row, int64_t n) {
    if (n == 0) {
        return;
    }
    ggml_context_ptr ctx    = tensor_context(2);
    ggml_tensor *    source = ggml_view_2d(ctx.get(), from, from->ne[0], n, from->nb[1], from_row * from->nb[1]);
    ggml_tensor *    target = ggml_view_2d(ctx.get(), to, to->ne[0], n, to->nb[1], to_row * to->nb[1]);
    ggml_backend_view_init(source);
    ggml_backend_view_init(target);
    ggml_backend_tensor_copy(source, target);
}

void copy_rows(const layer & l, const kv_rows & from, kv_rows & to, int64_t n) {
    for (int32_t head = 0; head < (from.is_ragged() ? l.info.n_head_kv : 1); ++head) {
        const int64_t source = from.is_ragged() ? from.first_row(head) : 0;
        const int64_t target = to.is_ragged() ? to.first_row(head) : 0;
        copy_range(from.k, source, to.k, target, from.base_of(head) + n);
        copy_range(from.v, source, to.v, target, from.base_of(head) + n);
    }
}

static void reshape_rows(ggml_tensor * t, int64_t ne0, int64_t ne1) {
    t->ne[0] = ne0;
    t->ne[1] = ne1;
    t->nb[1] = ggml_row_size(t->type, ne0);
    t->nb[2] = t->nb[3] = t->nb[1] * ne1;
}

void make_uniform(layer & l) {
    kv_rows & r = l.rows;
    if (!r.is_ragged()) {
        return;
    }
    r.capacity = r.k->ne[1] / l.info.n_head_kv;  // not less than it had slots
    r.base.clear();
    reshape_rows(r.k, l.k->ne[0], r.capacity);
    reshape_rows(r.v, l.v->ne[0], r.capacity);
}

void adopt_rows(layer & l, kv_rows && rows) {
    for (ggml_tensor * t : { l.k, l.k_stream }) {
        t->data   = rows.k->data;
        t->buffer = rows.k->buffer;
    }
    for (ggml_tensor * t : { l.v, l.v_stream }) {
        t->data   = rows.v->data;
        t->buffer = rows.v->buffer;
    }
    l.rows = std::move(rows);
}

void return_freed_memory(int64_t bytes) {
#if defined(__GLIBC__)
    if (bytes >= TRIM_BYTES) {
        malloc_trim(0);
    }
#else
    (void) bytes;
#endif
}

// ---- the store's part ------------------------------------------------------------------------------------------------

// While a prompt is read layer by layer, only the layer at hand has to have room.
int64_t store::capacity() const {
    int64_t least = INT64_MAX;
    for (const layer & l : layers) {
        if (!reading || reading->window.layer == l.il) {
            least = std::min(least, l.rows.capacity);
        }
    }
    return least;
}

// llama.cpp's 256 keeps graphs the same for longer and suits GPU kernels. Flash attention on the CPU gives each thread an
// equal share of the slots, empty ones included, so at a small budget a finer padding is faster. Before an eviction the
// padding stays: another split of the slots would round differently than the cache without a budget.
// All layers have the same, and with some of them on a device it is the device's.
static int64_t padding(const std::vector<layer> & layers, bool evicted) {
    const bool on_host =
        std::all_of(layers.begin(), layers.end(), [](const layer & l) { return ggml_backend_buft_is_host(l.buft); });
    return evicted && on_host ? 64 : 256;
}

uint32_t store::kv_padding() const {
    return (uint32_t) padding(layers, evicted);
}

int64_t store::padded(int64_t n) const {
    return std::min<int64_t>(GGML_PAD(std::max<int64_t>(n, 1), (int64_t) kv_padding()), cells().size());
}

// Slots for the entries that an eviction leaves and those that generation adds until the next one. Where heads keep
// different numbers, slots are for the window and one entry before it.
int64_t store::evicted_capacity(int64_t budget, int64_t slack) const {
    const int64_t n_keep = is_ragged() ? params.window + 1 : budget;
    return std::min<int64_t>(GGML_PAD(n_keep + slack, padding(layers, true)), cells().size());
}

int64_t store::bytes_allocated() const {
    int64_t bytes = 0;
    for (const layer & l : layers) {
        bytes += l.rows.bytes();
    }
    return bytes;
}

void store::note_allocated(int64_t bytes) {
    bytes_peak = std::max(bytes_peak, bytes);
}

void store::resize_layer(layer & l, int64_t capacity) {
    kv_rows       rows = allocate_rows(l, capacity, l.rows.base);
    const int64_t n    = std::min({ (int64_t) cells().used_max_p1(), l.rows.capacity, capacity });
    note_allocated(bytes_allocated() + rows.bytes());
    if (l.rows.buf) {
        copy_rows(l, l.rows, rows, n);
    }
    memory_version += 1;
    adopt_rows(l, std::move(rows));
}

// Layer by layer, so that only one layer exists twice at a time. When memory runs out, the layers that have grown shrink
// again; they hold the same entries at every moment.
void store::resize(int64_t capacity) {
    const int64_t before = bytes_allocated();
    const int64_t old    = this->capacity();
    try {
        for (layer & l : layers) {
            if (l.rows.capacity != capacity) {
                resize_layer(l, capacity);
            }
        }
    } catch (const error &) {
        shrink_layers(old);
        throw;
    }
    return_freed_memory(before);
}

// Gives back what it can: a layer for which there is no memory to shrink keeps its room.
void store::shrink_layers(int64_t capacity) {
    const int64_t before = bytes_allocated();
    for (layer & l : layers) {
        if (capacity > 0 && l.rows.capacity > capacity) {
            try {
                resize_layer(l, capacity);
            } catch (const error &) {
                continue;
            }
        }
    }
    return_freed_memory(before - bytes_allocated());
}

// Room for n entries per head, exactly (up to padding). What an earlier, longer content left is given back, but not the
// room that the next entries up to budget plus slack need.
void store::reserve(llama_context & lctx, int64_t n) {
    if (n < 0 || n > (int64_t) cells().size()) {
        throw error(CRITICALKV_ERR_ARGUMENT,
                    "n is " + std::to_string(n) + ", allowed: 0 to " + std::to_string(cells().size()) + " (n_ctx)");
    }
    const int64_t slots  = n - (n_entries() - n_used());
    const int64_t target = padded(std::max<int64_t>(slots, cells().used_max_p1()));
    const int64_t usual  = evicted ? std::max(target, evicted_capacity(budget, slack)) : target;
    int64_t       most   = 0;
    for (const layer & l : layers) {
        most = std::max(most, l.rows.capacity);
    }
    if (capacity() < target) {
        lctx.synchronize();
        resize(target);
    } else if (most > usual + usual / 4) {
        lctx.synchronize();
        shrink_layers(usual);
    }
}

// The hook in a decode: by a quarter at least, so that callers who reserve nothing do not copy the cache for every ubatch.
bool store::make_room(int64_t n_kv) {
    if (reading && (n_kv > capacity() || n_positions() > reading->first + reading->n_tokens)) {
        set_last_error("these tokens are not those of the prompt that is being read");
        return false;
    }
    if (n_kv <= capacity()) {
        return true;
    }
    owner.synchronize();
    try {
        try {
            resize(padded(std::max(n_kv, capacity() + capacity() / 4)));
        } catch (const error &) {
            resize(n_kv);
        }
    } catch (const error & e) {
        set_last_error(e.what());
        return false;
    }
    return true;
}

}  // namespace criticalkv
