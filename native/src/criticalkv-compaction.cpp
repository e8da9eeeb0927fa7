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
static ggml_tensor * as_words(ggml_context * ctx, ggml_tensor * t, int64_t d, int64_t rows, int64_t heads) {
    const size_t  head_bytes = ggml_row_size(t->type, d);
    ggml_tensor * words      = ggml_new_tensor_3d(ctx, GGML_TYPE_I32, (int64_t) head_bytes / 4, rows, heads);
    words->nb[1]             = t->nb[1];
    words->nb[2]             = head_bytes;
    words->nb[3]             = words->nb[1] * rows;
    words->view_src          = t;
    words->data              = t->data;
    words->buffer            = t->buffer;
    return words;
}

static void gather(graph & gr, ggml_tensor * from, ggml_tensor * to, int64_t d, int64_t n, ggml_tensor * slots) {
    ggml_context * ctx   = gr.ctx();
    const int64_t  heads = slots->ne[1];
    ggml_tensor *  rows  = ggml_get_rows(ctx, as_words(ctx, from, d, n, heads), slots);
    ggml_build_forward_expand(gr.gf(), ggml_cpy(ctx, rows, as_words(ctx, to, d, slots->ne[0], heads)));
}

// Words do not fit heads such as 96 numbers in q8_0 (102 bytes).
static bool fits_words(const ggml_tensor * t, int64_t d) {
    return ggml_row_size(t->type, d) % 4 == 0;
}

// `to` may be `from`: slots ascend, so a row moves to where no later one is read.
static void gather_on_host(const ggml_tensor * from, ggml_tensor * to, int64_t d, const head_lists & keep) {
    const size_t head_bytes = ggml_row_size(from->type, d);
    for (size_t head = 0; head < keep.size(); ++head) {
        const char * source = (const char *) from->data + head * head_bytes;
        char *       target = (char *) to->data + head * head_bytes;
        for (const int32_t slot : keep[head]) {
            std::memmove(target, source + slot * from->nb[1], head_bytes);
            target += to->nb[1];
        }
    }
}

kv_rows compact_layer(llama_context & lctx, const layer & l, int64_t n, int64_t capacity, const head_lists & keep) {
    kv_rows rows = allocate_rows(l, capacity);
    if (ggml_backend_buffer_is_host(rows.buf.get()) &&
        !(fits_words(l.k, l.info.n_embd_k) && fits_words(l.v, l.info.n_embd_v))) {
        gather_on_host(l.rows.k, rows.k, l.info.n_embd_k, keep);
        gather_on_host(l.rows.v, rows.v, l.info.n_embd_v, keep);
        return rows;
    }
    const int64_t        n_keep = (int64_t) keep[0].size();
    std::vector<int32_t> slots;
    for (const std::vector<int32_t> & head : keep) {
        slots.insert(slots.end(), head.begin(), head.end());
    }
    graph            gr(32);
    ggml_context *   ctx      = gr.ctx();
    const head_range before   = { 0, l.info.n_head_kv, 0, n };
    const head_range after    = { 0, l.info.n_head_kv, 0, n_keep };
    ggml_tensor *    in_slots = gr.input(GGML_TYPE_I32, n_keep, l.info.n_head_kv, slots.data());
    ggml_tensor *    node     = fused_compaction(
        ctx, head_view(ctx, l.rows.k, l.info.n_embd_k, before), head_view(ctx, rows.k, l.info.n_embd_k, after),
        head_view(ctx, l.rows.v, l.info.n_embd_v, before), head_view(ctx, rows.v, l.info.n_embd_v, after), in_slots);
    if (device_fuses(l.buft, node)) {
        ggml_build_forward_expand(gr.gf(), node);
    } else {
        gather(gr, l.rows.k, rows.k, l.info.n_embd_k, n, in_slots);
        gather(gr, l.rows.v, rows.v, l.info.n_embd_v, n, in_slots);
    }
    gr.compute(lctx);
    return rows;
}

bool store::is_on_host() const {
    return std::all_of(layers.begin(), layers.end(),
                       [](const layer & l) { return ggml_backend_buffer_is_host(l.rows.buf.get()); });
}

void store::compact_in_place(const layer_lists & keep) noexcept {
    for (size_t i = 0; i < layers.size(); ++i) {
        const layer & l = layers[i];
        gather_on_host(l.rows.k, l.rows.k, l.info.n_embd_k, keep[i]);
        gather_on_host(l.rows.v, l.rows.v, l.info.n_embd_v, keep[i]);
    }
}

std::vector<kv_rows> store::compact(llama_context & lctx, const layer_lists & keep, int64_t capacity) {
    int64_t              bytes = bytes_allocated();
    std::vector<kv_rows> rows;
    for (size_t i = 0; i < layers.size(); ++i) {
        rows.push_back(compact_layer(lctx, layers[i], n_entries(), capacity, keep[i]));
        bytes += rows.back().bytes();
        note_allocated(bytes);
    }
    return rows;
}

}  // namespace criticalkv
