#include "criticalkv-dispatch.h"

#include "common.cuh"
#include "criticalkv-kernels.h"

namespace criticalkv {

static cudaError_t compute_attention(ggml_backend_cuda_context & ctx, attention_args p) {
    ggml_cuda_pool_alloc<uint8_t> workspace(ctx.pool(), attention_workspace_bytes(p));
    p.workspace = (float *) workspace.get();
    return observed_attention(p, ctx.stream());
}

void cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    switch (fused_params_of(node).op) {
        case fused_op::ATTENTION:
            CUDA_CHECK(compute_attention(ctx, attention_args_of(node)));
            return;
        case fused_op::COMPACTION:
            CUDA_CHECK(compact_rows(compaction_args_of(node), ctx.stream()));
            return;
        case fused_op::GRAM:
            CUDA_CHECK(gram_norms(gram_args_of(node), ctx.stream()));
            return;
        case fused_op::L1:
            CUDA_CHECK(l1_norms(l1_args_of(node), ctx.stream()));
            return;
    }
    GGML_ABORT("not one of our nodes");
}

}  // namespace criticalkv
