// CPU twins of the fused CUDA kernels (native/cuda): the same formulas over the same arguments, in host memory.
//
// Each call does the share `ith` of `nth` of the work, as the function of a GGML_OP_CUSTOM does; shares write to different
// places and do not wait for one another. Sums of many terms are double, as in ggml's softmax, so the twins are the more
// exact side of a comparison. Nothing is allocated but a few rows.
#pragma once

#include "criticalkv-args.h"

namespace criticalkv {

void observed_attention_cpu(const attention_args & p, int ith, int nth);  // by KV heads
void compact_rows_cpu(const compaction_args & p, int ith, int nth);       // by KV heads
void gram_norms_cpu(const gram_args & p, int ith, int nth);               // by entries
void l1_norms_cpu(const l1_args & p, int ith, int nth);                   // by entries

}  // namespace criticalkv
