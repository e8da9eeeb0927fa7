// Compaction: the kept rows of every head move to the front of the cache, bit for bit.
//
// Rows are gathered into staging buffers first; until all layers are gathered nothing in the cache has changed, so a
// failure or an abort leaves it as it was. The staged rows are then copied to the front, which cannot fail.

#include "criticalkv-error.h"
#include "criticalkv-graph.h"
#include "criticalkv-store.h"

#include <map>

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

// Staging tensors for all layers, one buffer per device.
struct staging {
    struct pair {
        ggml_tensor * k;
        ggml_tensor * v;
    };

    std::vector<ggml_context_ptr>        ctxs;
    std::vector<ggml_backend_buffer_ptr> bufs;
    std::vector<pair>                    tensors;  // [layer]
};

static staging allocate_staging(const std::vector<layer> & layers, int64_t rows) {
    staging                                              s;
    std::map<ggml_backend_buffer_type_t, ggml_context *> by_buft;
    for (const layer & l : layers) {
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(l.k->buffer);
        if (by_buft.find(buft) == by_buft.end()) {
            ggml_init_params init = {};
            init.mem_size         = ggml_tensor_overhead() * 2 * layers.size();
            init.no_alloc         = true;
            s.ctxs.emplace_back(ggml_init(init));
            by_buft[buft] = s.ctxs.back().get();
        }
        ggml_context * ctx = by_buft[buft];
        s.tensors.push_back({ ggml_new_tensor_2d(ctx, l.k->type, l.k->ne[0], rows),
                              ggml_new_tensor_2d(ctx, l.v->type, l.v->ne[0], rows) });
    }
    for (const auto & [buft, ctx] : by_buft) {
        s.bufs.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
        if (!s.bufs.back()) {
            throw error(CRITICALKV_ERR_MEMORY, "no memory to stage " + std::to_string(rows) + " entries per head");
        }
    }
    return s;
}

static void gather(graph & gr, ggml_tensor * from, ggml_tensor * to, int64_t d, int64_t n, ggml_tensor * slots) {
    ggml_context * ctx   = gr.ctx();
    const int64_t  heads = slots->ne[1];
    ggml_tensor *  rows  = ggml_get_rows(ctx, as_words(ctx, from, d, n, heads), slots);
    ggml_build_forward_expand(gr.gf(), ggml_cpy(ctx, rows, as_words(ctx, to, d, slots->ne[0], heads)));
}

static void copy_to_front(ggml_tensor * from, ggml_tensor * cache) {
    ggml_init_params init = {};
    init.mem_size         = ggml_tensor_overhead();
    init.no_alloc         = true;
    ggml_context_ptr ctx(ggml_init(init));
    ggml_tensor *    front = ggml_view_2d(ctx.get(), cache, from->ne[0], from->ne[1], cache->nb[1], 0);
    ggml_backend_view_init(front);
    ggml_backend_tensor_copy(from, front);
}

void store::compact(llama_context & lctx, const keep_lists & keep) {
    const int64_t n      = n_entries();
    const int64_t n_keep = (int64_t) keep[0][0].size();
    const staging staged = allocate_staging(layers, n_keep);
    for (size_t i = 0; i < layers.size(); ++i) {
        const layer &        l = layers[i];
        std::vector<int32_t> slots;
        for (const std::vector<int32_t> & head : keep[i]) {
            slots.insert(slots.end(), head.begin(), head.end());
        }
        graph         gr(32);
        ggml_tensor * in_slots = gr.input(GGML_TYPE_I32, n_keep, l.info.n_head_kv, slots.data());
        gather(gr, l.k, staged.tensors[i].k, l.info.n_embd_k, n, in_slots);
        gather(gr, l.v, staged.tensors[i].v, l.info.n_embd_v, n, in_slots);
        gr.compute(lctx);
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        copy_to_front(staged.tensors[i].k, layers[i].k);
        copy_to_front(staged.tensors[i].v, layers[i].v);
    }
}

}  // namespace criticalkv
