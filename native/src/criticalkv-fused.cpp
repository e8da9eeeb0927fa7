#include "criticalkv-fused.h"

#include "criticalkv-fused-cpu.h"

namespace criticalkv {

bool device_fuses(ggml_backend_buffer_type_t buft, const ggml_tensor * node) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    if (dev == nullptr || ggml_backend_buft_is_host(buft) || !ggml_backend_dev_supports_op(dev, node)) {
        return false;
    }
    // a device that takes any custom op whatever (that of another machine, ggml-rpc) does not know ours
    ggml_tensor stranger = *node;
    std::memset(stranger.op_params, 0, sizeof(stranger.op_params));
    return !ggml_backend_dev_supports_op(dev, &stranger);
}

bool compute_fused(llama_context & lctx, graph & gr, ggml_backend_buffer_type_t buft, ggml_tensor * node, float * out) {
    if (!device_fuses(buft, node)) {
        return false;
    }
    gr.output(node);
    gr.compute(lctx);
    ggml_backend_tensor_get(node, out, 0, ggml_nbytes(node));
    return true;
}

static void compute_on_cpu(ggml_tensor * node, int ith, int nth, void * /*userdata*/) {
    switch (fused_params_of(node).op) {
        case fused_op::ATTENTION:
            observed_attention_cpu(attention_args_of(node), ith, nth);
            return;
        case fused_op::COMPACTION:
            compact_rows_cpu(compaction_args_of(node), ith, nth);
            return;
        case fused_op::GRAM:
            gram_norms_cpu(gram_args_of(node), ith, nth);
            return;
        case fused_op::L1:
            l1_norms_cpu(l1_args_of(node), ith, nth);
            return;
    }
}

static ggml_tensor * with_params(ggml_tensor * node, fused_params params) {
    params.magic = FUSED_MAGIC;
    std::memcpy((char *) node->op_params + sizeof(custom_params), &params, sizeof(params));
    return node;
}

static fused_params plain(fused_op op) {
    fused_params p = {};
    p.op           = op;
    return p;
}

ggml_tensor * fused_attention(ggml_context * ctx, ggml_tensor * k, ggml_tensor * queries, ggml_tensor * rows,
                              ggml_tensor * mask, ggml_tensor * sinks, int64_t n_before, const fused_params & params) {
    ggml_tensor * args[] = { k, queries, rows, mask, sinks };
    const int     n_args = sinks != nullptr ? 5 : 4;
    fused_params  p      = params;
    p.op                 = fused_op::ATTENTION;
    return with_params(ggml_custom_4d(ctx, GGML_TYPE_F32, n_before, k->ne[2], 1, 1, args, n_args, compute_on_cpu,
                                      GGML_N_TASKS_MAX, nullptr),
                       p);
}

ggml_tensor * fused_compaction(ggml_context * ctx, ggml_tensor * k_from, ggml_tensor * k_to, ggml_tensor * v_from,
                               ggml_tensor * v_to, ggml_tensor * slots) {
    ggml_tensor * args[] = { k_from, v_from, slots, v_to };
    return with_params(ggml_custom_inplace(ctx, k_to, args, 4, compute_on_cpu, GGML_N_TASKS_MAX, nullptr),
                       plain(fused_op::COMPACTION));
}

ggml_tensor * fused_gram(ggml_context * ctx, ggml_tensor * v, ggml_tensor * gram) {
    ggml_tensor * args[] = { v, gram };
    return with_params(ggml_custom_4d(ctx, GGML_TYPE_F32, v->ne[1], v->ne[2], 1, 1, args, 2, compute_on_cpu,
                                      GGML_N_TASKS_MAX, nullptr),
                       plain(fused_op::GRAM));
}

ggml_tensor * fused_l1(ggml_context * ctx, ggml_tensor * v, ggml_tensor * w) {
    ggml_tensor * args[] = { v, w };
    return with_params(ggml_custom_4d(ctx, GGML_TYPE_F32, v->ne[1], v->ne[2], 1, 1, args, 2, compute_on_cpu,
                                      GGML_N_TASKS_MAX, nullptr),
                       plain(fused_op::L1));
}

}  // namespace criticalkv
