// What the rules of ggml's CUDA backend (cuda-rules.inc, taken from its source by extract_rules.py) find around them
// there: the same names, for one mock device.
#pragma once

#include "criticalkv-dispatch.h"  // what the rules say of our own ops
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

// of the CUDA toolkit; only whether CUB is there depends on it
#define CUDART_VERSION 13000

#define __host__
#define __device__

#define QK_K 256  // numbers in a super-block of the K quants, ggml-common.h

struct ggml_cuda_device_info {
    struct {
        int    cc;          // 100 * major + 10 * minor of the compute capability
        size_t smpb;        // shared memory of a block
        bool   integrated;  // shares the memory of the host
    } devices[1];
};

const ggml_cuda_device_info & ggml_cuda_info();

struct ggml_backend_cuda_device_context {
    int device;
    int op_offload_min_batch_size;
};

struct ggml_backend_cuda_buffer_type_context {
    int device;
};

// What the backend remembers of a graph, to see whether the next computation can replay it.
struct ggml_cuda_graph {
    struct node_properties {
        ggml_tensor node;
        void *      node_src_data_ptrs[GGML_MAX_SRC];
        int64_t     node_src_ne[GGML_MAX_SRC][GGML_MAX_DIMS];
        size_t      node_src_nb[GGML_MAX_SRC][GGML_MAX_DIMS];
    };

    std::vector<node_properties> node_props;
    uint64_t                     uid = 0;
};

struct ggml_backend_cuda_context {
    std::unordered_map<const void *, ggml_cuda_graph> graphs;

    ggml_cuda_graph * cuda_graph(const void * key) { return &graphs[key]; }
};

bool ggml_backend_buft_is_cuda(ggml_backend_buffer_type_t buft);
bool ggml_backend_buft_is_cuda_host(ggml_backend_buffer_type_t buft);
