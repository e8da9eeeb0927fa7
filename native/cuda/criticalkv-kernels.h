// The fused kernels, for code that is not compiled by nvcc. Each call only puts launches on the stream. The arguments must
// be ones that `supports` (criticalkv-supports.h) takes.
#pragma once

#include "criticalkv-args.h"

#include <cuda_runtime_api.h>

namespace criticalkv {

int64_t     attention_workspace_bytes(const attention_args & p);
cudaError_t observed_attention(const attention_args & p, cudaStream_t stream);
cudaError_t compact_rows(const compaction_args & p, cudaStream_t stream);
cudaError_t gram_norms(const gram_args & p, cudaStream_t stream);
cudaError_t l1_norms(const l1_args & p, cudaStream_t stream);

}  // namespace criticalkv
