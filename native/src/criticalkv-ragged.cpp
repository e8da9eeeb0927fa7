#include "criticalkv-ragged.h"

#include "criticalkv-store.h"
#include "llama-graph.h"

#include <algorithm>
#include <map>
#include <vector>

namespace criticalkv {

// The mask of a graph: `base` entries that all tokens see, then slots as the cells tell, then none.
class input_ragged_mask : public llm_graph_input_i {
  public:
    input_ragged_mask(store & owner, ggml_tensor * mask, int64_t base, int64_t slots) :
        mask(mask), owner(owner), base(base), slots(slots), memory_version(owner.memory_version) {}

    void set_input(const llama_ubatch * ubatch) override {
        std::vector<ggml_fp16_t> data(ggml_nelements(mask));
        owner.fill_mask(*ubatch, base, slots, mask->ne[0], data.data());
        ggml_backend_tensor_set(mask, data.data(), 0, ggml_nbytes(mask));
    }

    // llama.cpp compares the number of slots by its own mask
    bool can_reuse(const llm_graph_params & params) override {
        return memory_version == owner.memory_version && !owner.is_reading() &&
               mask->ne[1] == (int64_t) params.ubatch.n_tokens;
    }

    ggml_tensor * mask;  // F16 [base + slots (+ padding), n_tokens]

    std::map<ggml_backend_buffer_type_t, ggml_tensor *> on_device;  // copies

  private:
    store &       owner;
    const int64_t base;
    const int64_t slots;
    const int64_t memory_version;
};

static input_ragged_mask & input_of(store & owner, ggml_context * ctx, llm_graph_result * res, int64_t slots,
                                    int64_t n_tokens) {
    for (const auto & input : res->inputs) {
        if (auto * found = dynamic_cast<input_ragged_mask *>(input.get())) {
            return *found;
        }
    }
    const int64_t base    = owner.longest_base();
    const int64_t padding = owner.is_on_host() ? 0 : RAGGED_PADDING;
    ggml_tensor * mask    = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, base + slots + padding, n_tokens);
    ggml_set_input(mask);
    ggml_set_name(mask, "criticalkv_ragged_mask");
    auto   input = std::make_unique<input_ragged_mask>(owner, mask, base, slots);
    auto & kept  = *input;
    res->add_input(std::move(input));
    return kept;
}

// The graph's mask where the layer is: each device gets one copy, of which heads read their parts.
static ggml_tensor * mask_for(store & owner, ggml_context * ctx, llm_graph_result * res, const layer & l, int64_t slots,
                              int64_t n_tokens) {
    input_ragged_mask & input = input_of(owner, ctx, res, slots, n_tokens);
    if (ggml_backend_buft_is_host(l.buft)) {
        return input.mask;
    }
    ggml_tensor *& copy = input.on_device[l.buft];
    if (copy == nullptr) {
        copy = ggml_cont(ctx, input.mask);
    }
    return copy;
}

// What was computed for one head goes to its slots.
static void write_slots(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * rows, int64_t first, int64_t slots,
                        ggml_tensor * cur, int64_t head, ggml_tensor * indices) {
    ggml_tensor * to   = ggml_view_2d(ctx, rows, rows->ne[0], slots, rows->nb[1], first * rows->nb[1]);
    ggml_tensor * from = ggml_view_2d(ctx, cur, cur->ne[0], cur->ne[2], cur->nb[2], head * cur->nb[1]);
    ggml_build_forward_expand(gf, ggml_set_rows(ctx, to, from, indices));
}

// The first n rows of a head, as flash attention takes them: [d, n].
static ggml_tensor * read_rows(ggml_context * ctx, ggml_tensor * rows, int64_t first, int64_t n) {
    ggml_tensor * part = ggml_view_2d(ctx, rows, rows->ne[0], n, rows->nb[1], first * rows->nb[1]);
    return part->type == GGML_TYPE_F32 ? ggml_cast(ctx, part, GGML_TYPE_F16) : part;
}

// Pairs first: each number is copied as often as the logarithm of the number of heads.
static ggml_tensor * concat_heads(ggml_context * ctx, std::vector<ggml_tensor *> parts) {
    while (parts.size() > 1) {
        std::vector<ggml_tensor *> pairs;
        for (size_t i = 0; i + 1 < parts.size(); i += 2) {
            pairs.push_back(ggml_concat(ctx, parts[i], parts[i + 1], 1));
        }
        if (parts.size() % 2 != 0) {
            pairs.push_back(parts.back());
        }
        parts = std::move(pairs);
    }
    return parts[0];
}

ggml_tensor * attend_ragged(store & owner, ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res,
                            const layer & l, const attention_call & call) {
    const kv_rows & rows     = l.rows;
    const bool      on_host  = ggml_backend_buft_is_host(l.buft);
    const int64_t   n_tokens = call.q->ne[2];
    const int64_t   group    = l.info.n_head / l.info.n_head_kv;
    // there are more only in graphs that are never computed: those for llama.cpp to reserve, layers below a window
    const int64_t slots = std::min(call.n_kv, rows.capacity);
    ggml_tensor * mask  = mask_for(owner, ctx, res, l, std::min(call.n_kv, owner.most_slots()), n_tokens);
    const int64_t base  = owner.longest_base();

    ggml_build_forward_expand(gf, call.kq_mask);  // llama.cpp fills it in any case
    for (int64_t head = 0; head < l.info.n_head_kv; ++head) {
        const int64_t first = rows.first_row(head) + rows.base[head];
        write_slots(ctx, gf, rows.k, first, rows.capacity, call.k_cur, head, call.k_idxs);
        write_slots(ctx, gf, rows.v, first, rows.capacity, call.v_cur, head, call.v_idxs);
    }
    std::vector<ggml_tensor *> parts;
    for (int64_t head = 0; head < l.info.n_head_kv; ++head) {
        const int64_t n_used = rows.base[head] + slots;
        const int64_t n      = on_host ? n_used : GGML_PAD(n_used, RAGGED_PADDING);
        ggml_tensor * q      = ggml_view_3d(ctx, call.q, call.q->ne[0], group, n_tokens, call.q->nb[1], call.q->nb[2],
                                            head * group * call.q->nb[1]);
        ggml_tensor * k      = read_rows(ctx, rows.k, rows.first_row(head), n);
        ggml_tensor * v      = read_rows(ctx, rows.v, rows.first_row(head), n);
        ggml_tensor * m =
            ggml_view_2d(ctx, mask, n, n_tokens, mask->nb[1], (base - rows.base[head]) * sizeof(ggml_fp16_t));
        if (n_tokens > 1 || !on_host) {
            m = ggml_cont(ctx, m);  // whole and aligned
        }
        ggml_tensor * cur =
            ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), k, v, m, call.scale, 0.0f, call.softcap);
        if (call.sinks != nullptr) {
            ggml_flash_attn_ext_add_sinks(
                cur, ggml_view_1d(ctx, call.sinks, group, head * group * (int64_t) call.sinks->nb[0]));
        }
        ggml_prec_set_acc(cur, GGML_PREC_F32);
        parts.push_back(cur);  // [n_embd_v, group, n_tokens]
    }
    ggml_tensor * out = concat_heads(ctx, std::move(parts));
    out               = ggml_reshape_2d(ctx, out, out->ne[0] * out->ne[1], n_tokens);
    ggml_build_forward_expand(gf, out);
    return out;
}

}  // namespace criticalkv
