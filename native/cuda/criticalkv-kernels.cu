// The one translation unit of the fused kernels.

#include "criticalkv-kernels.h"

#include "criticalkv-attention.cuh"
#include "criticalkv-compaction.cuh"
#include "criticalkv-gram.cuh"
#include "criticalkv-l1.cuh"

namespace criticalkv {

int64_t attention_workspace_bytes(const attention_args & p) {
    return attention_workspace(p);
}

cudaError_t observed_attention(const attention_args & p, cudaStream_t stream) {
    return launch_attention(p, stream);
}

cudaError_t compact_rows(const compaction_args & p, cudaStream_t stream) {
    return launch_compaction(p, stream);
}

cudaError_t gram_norms(const gram_args & p, cudaStream_t stream) {
    return launch_gram(p, stream);
}

cudaError_t l1_norms(const l1_args & p, cudaStream_t stream) {
    return launch_l1(p, stream);
}

}  // namespace criticalkv
