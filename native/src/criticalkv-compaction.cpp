// Compaction: the kept rows of every head move, bit for bit, to memory with room for them and what generation adds until
// the next eviction.
//
// Memory of another size is new: until all layers are gathered nothing in the cache has changed, so a failure or an abort
// leaves it as it was. The cache then takes over the new memory and frees the old, which cannot fail (store::commit).
// Between two evictions of one generation the size stays the same; on the host the rows then move down where they are,
// which cannot fail either.

#include "criticalkv-error.h"
#include "criticalkv-fused.h"
#include "criticalkv-graph.h"
#include "criticalkv-norms.h"
#include "criticalkv-store.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <cstring>

namespace criticalkv {

// The same memory as I32 words [words of a head's row, rows, heads]: gathering words instead of numbers moves every
// cache type bit for bit, where get_rows of the type itself would convert to f32.
static ggml_tensor * as_words(ggml_context * ctx, ggml_tensor * view) {
    const size_t  head_bytes = ggml_row_size(view->type, view->ne[0]);
    ggml_tensor * words = ggml_new_tensor_3d(ctx, GGML_TYPE_I32, (int64_t) head_bytes / 4, view->ne[1], view->ne[2]);
    words->nb[1]        = view->nb[1];
    words->nb[2]        = view->nb[2];
    words->nb[3]        = view->nb[3];
    words->view_src     = view->view_src;
    words->view_offs    = view->view_offs;
    words->data         = view->data;
    words->buffer       = view->buffer;
    return words;
}

static void gather(graph & gr, ggml_tensor * from, ggml_tensor * to, ggml_tensor * slots) {
    ggml_tensor * rows = ggml_get_rows(gr.ctx(), as_words(gr.ctx(), from), slots);
    ggml_build_forward_expand(gr.gf(), ggml_cpy(gr.ctx(), rows, as_words(gr.ctx(), to)));
}

// Words do not fit heads such as 96 numbers in q8_0 (102 bytes).
static bool fits_words(const ggml_tensor * t, int64_t d) {
    return ggml_row_size(t->type, d) % 4 == 0;
}

// Rows [d, n] and [d, slots]. `to` may be `from`: slots ascend, so a row moves to where no later one is read.
static void gather_head(const ggml_tensor * from, size_t from_offset, ggml_tensor * to, size_t to_offset, int64_t d,
                        const std::vector<int32_t> & slots) {
    const size_t head_bytes = ggml_row_size(from->type, d);
    const char * source     = (const char *) from->data + from_offset;
    char *       target     = (char *) to->data + to_offset;
    for (const int32_t slot : slots) {
        std::memmove(target, source + slot * from->nb[1], head_bytes);
        target += to->nb[1];
    }
}

static size_t head_offset(const kv_rows & rows, const ggml_tensor * t, int64_t d, int64_t head) {
    return rows.is_ragged() ? rows.first_row(head) * t->nb[1] : head * ggml_row_size(t->type, d);
}

static void gather_on_host(const layer & l, const kv_rows & from, const kv_rows & to, const head_lists & keep) {
    const int64_t d_k = l.info.n_embd_k;
    const int64_t d_v = l.info.n_embd_v;
    for (size_t i = 0; i < keep.size(); ++i) {
        const int64_t head = (int64_t) i;
        gather_head(from.k, head_offset(from, from.k, d_k, head), to.k, head_offset(to, to.k, d_k, head), d_k, keep[i]);
        gather_head(from.v, head_offset(from, from.v, d_v, head), to.v, head_offset(to, to.v, d_v, head), d_v, keep[i]);
    }
}

// The kept rows of some KV heads, of `from` and `to` in rows: by one node, if the layer's device has a kernel for it.
static void gather_in_graph(llama_context & lctx, const layer & l, const kv_rows & rows, const head_range & from,
                            const head_range & to, const std::vector<int32_t> & slots) {
    graph          gr(32);
    ggml_context * ctx      = gr.ctx();
    ggml_tensor *  in_slots = gr.input(GGML_TYPE_I32, to.n, to.heads, slots.data());
    ggml_tensor *  k_from   = key_view(ctx, l, l.rows, from);
    ggml_tensor *  v_from   = value_view(ctx, l, l.rows, from);
    ggml_tensor *  k_to     = key_view(ctx, l, rows, to);
    ggml_tensor *  v_to     = value_view(ctx, l, rows, to);
    ggml_tensor *  node     = fused_compaction(ctx, k_from, k_to, v_from, v_to, in_slots);
    if (device_fuses(l.buft, node)) {
        ggml_build_forward_expand(gr.gf(), node);
    } else {
        gather(gr, k_from, k_to, in_slots);
        gather(gr, v_from, v_to, in_slots);
    }
    gr.compute(lctx);
}

kv_rows compact_layer(llama_context & lctx, const layer & l, int64_t capacity, const head_lists & keep,
                      std::vector<int64_t> base) {
    const int64_t n_head_kv = l.info.n_head_kv;
    kv_rows       rows      = allocate_rows(l, capacity, std::move(base));
    if (ggml_backend_buffer_is_host(rows.buf.get()) &&
        (rows.is_ragged() || !(fits_words(l.k, l.info.n_embd_k) && fits_words(l.v, l.info.n_embd_v)))) {
        gather_on_host(l, l.rows, rows, keep);
        return rows;
    }
    if (rows.is_ragged()) {
        for (int64_t head = 0; head < n_head_kv; ++head) {
            const int64_t n_from = l.rows.base_of(head) + l.rows.capacity;
            gather_in_graph(lctx, l, rows, { head, 1, 0, n_from }, { head, 1, 0, (int64_t) keep[head].size() },
                            keep[head]);
        }
        return rows;
    }
    std::vector<int32_t> slots;
    for (const std::vector<int32_t> & head : keep) {
        slots.insert(slots.end(), head.begin(), head.end());
    }
    gather_in_graph(lctx, l, rows, { 0, n_head_kv, 0, l.rows.capacity }, { 0, n_head_kv, 0, (int64_t) keep[0].size() },
                    slots);
    return rows;
}

bool store::is_on_host() const {
    return std::all_of(layers.begin(), layers.end(),
                       [](const layer & l) { return ggml_backend_buffer_is_host(l.rows.buf.get()); });
}

void store::compact_in_place(const layer_lists & keep) noexcept {
    for (size_t i = 0; i < layers.size(); ++i) {
        gather_on_host(layers[i], layers[i].rows, layers[i].rows, keep[i]);
    }
}

std::vector<kv_rows> store::compact(llama_context & lctx, const layer_lists & keep, int64_t capacity) {
    int64_t              bytes = bytes_allocated();
    std::vector<kv_rows> rows;
    for (size_t i = 0; i < layers.size(); ++i) {
        rows.push_back(compact_layer(lctx, layers[i], capacity, keep[i], bases_of(layers[i], keep[i])));
        bytes += rows.back().bytes();
        note_allocated(bytes);
    }
    return rows;
}

}  // namespace criticalkv
