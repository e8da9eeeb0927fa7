// The graph of one layer, cut out of llama.cpp's graph while that is being built.

#include "criticalkv-prefill.h"
#include "llama-batch.h"

#include <algorithm>
#include <cstring>

namespace criticalkv {

// llama.cpp sets all inputs of a graph, and cannot set one that was not allocated: so those that nothing reads stay too.
static void keep_inputs(ggml_context * ctx, ggml_cgraph * gf) {
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
        if (t->flags & GGML_TENSOR_FLAG_INPUT) {
            ggml_build_forward_expand(gf, t);
        }
    }
}

static size_t hidden_offset(const prefill & p, const llama_ubatch & ubatch) {
    return p.examine ? 0 : (size_t) (ubatch.pos[0] - p.first) * p.hidden->nb[1];
}

// The builder holds on to `cur`, so it becomes a view in place.
static void read_hidden(prefill & p, llm_graph_result & res, const llama_ubatch & ubatch, ggml_tensor * cur) {
    const size_t offset = hidden_offset(p, ubatch);
    if (p.examine) {
        for (ggml_tensor * t = ggml_get_first_tensor(res.get_ctx()); t; t = ggml_get_next_tensor(res.get_ctx(), t)) {
            if (t != cur) {
                p.dropped.insert(t);
            }
        }
    }
    std::fill(std::begin(cur->src), std::end(cur->src), nullptr);
    std::memset(cur->op_params, 0, sizeof(cur->op_params));
    cur->op        = GGML_OP_VIEW;
    cur->src[0]    = p.hidden;
    cur->view_src  = p.hidden;
    cur->view_offs = offset;
    cur->data      = p.hidden->data == nullptr ? nullptr : (char *) p.hidden->data + offset;
    cur->buffer    = p.hidden->buffer;
    ggml_graph_clear(res.get_gf());
    keep_inputs(res.get_ctx(), res.get_gf());
    p.cut = true;
}

static void write_hidden(const prefill & p, llm_graph_result & res, const llama_ubatch & ubatch, ggml_tensor * cur) {
    ggml_context * ctx  = res.get_ctx();
    ggml_tensor *  rows = ggml_reshape_2d(ctx, cur, p.hidden->ne[0], ubatch.n_tokens);
    ggml_tensor *  target =
        ggml_view_2d(ctx, p.hidden, p.hidden->ne[0], ubatch.n_tokens, p.hidden->nb[1], hidden_offset(p, ubatch));
    ggml_build_forward_expand(res.get_gf(), ggml_cpy(ctx, rows, target));
    keep_inputs(ctx, res.get_gf());
}

static bool fits_hidden(const prefill & p, const llama_ubatch & ubatch, const ggml_tensor * cur) {
    return cur->type == GGML_TYPE_F32 && ggml_is_contiguous(cur) && cur->view_src == nullptr &&
           ggml_nelements(cur) == p.hidden->ne[0] * (int64_t) ubatch.n_tokens;
}

llm_graph_cb window_callback(prefill & p, llm_graph_result * res, llm_graph_cb cb) {
    p.cut = false;
    p.dropped.clear();
    return [&p, res, cb = std::move(cb)](const llama_ubatch & ubatch, ggml_tensor * cur, const char * name, int il) {
        cb(ubatch, cur, name, il);
        const bool begins = il == p.window.layer - 1 && !p.cut;
        const bool ends   = il == p.window.layer && !p.window.open;
        if (std::strcmp(name, "l_out") != 0 || !(begins || ends)) {
            return;
        }
        if (!fits_hidden(p, ubatch, cur)) {
            p.refused = "the output of a layer is not one row of numbers per token";
            throw window_complete();
        }
        if (begins) {
            read_hidden(p, *res, ubatch, cur);
        } else {
            write_hidden(p, *res, ubatch, cur);
            throw window_complete();
        }
    };
}

static const ggml_tensor * root(const ggml_tensor * t) {
    return t->view_src != nullptr ? t->view_src : t;
}

const char * refuse_window(const prefill & p, ggml_cgraph * gf,
                           const std::unordered_set<const ggml_tensor *> & memory) {
    if (p.refused != nullptr) {
        return p.refused;
    }
    if (p.window.layer > 0 && !p.cut) {
        return "it does not name the outputs of its layers";
    }
    std::unordered_set<const ggml_tensor *> read;
    std::unordered_set<const ggml_tensor *> written;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        if (memory.count(root(node)) > 0 && node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE &&
            node->op != GGML_OP_PERMUTE && node->op != GGML_OP_TRANSPOSE) {
            written.insert(root(node));
        }
        for (const ggml_tensor * src : node->src) {
            if (src != nullptr && root(src) != root(node) && memory.count(root(src)) > 0) {
                read.insert(root(src));
                if (p.dropped.count(node) > 0) {
                    return "a layer reads the cache of another layer";
                }
            }
        }
    }
    for (const ggml_tensor * t : read) {
        if (written.count(t) == 0) {
            return "a layer reads a cache that another layer writes";
        }
    }
    return nullptr;
}

}  // namespace criticalkv
