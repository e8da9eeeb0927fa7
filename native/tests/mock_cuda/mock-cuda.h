/* mock-cuda.h: a ggml backend with one device that looks like a CUDA GPU and computes on the host. For tests.
 *
 * ggml_backend_load() takes the library. The device accepts what ggml's CUDA backend accepts (cuda-rules.h), its memory
 * is out of the host's reach (device-memory.h), and the CPU backend's code computes its graphs.
 *
 * Environment: MOCK_CUDA_CC, the compute capability (default 860); MOCK_CUDA_FUSED=0, no kernels for our own ops.
 */
#pragma once

#include <stdint.h>

#define MOCK_CUDA_API __attribute__((visibility("default")))

/* What has happened since mock_cuda_reset. Bytes between host and device, not within either. */
struct mock_cuda_traffic {
    int64_t bytes_up;   /* host to device */
    int64_t bytes_down; /* device to host */
    int64_t n_up;       /* transfers */
    int64_t n_down;
    int64_t n_nodes;    /* that the device computed, views not counted */
    int64_t n_replayed; /* graphs that CUDA would have run as captured ones */
    int64_t n_launched; /* graphs whose kernels it would have launched one by one */
};

extern "C" {
MOCK_CUDA_API struct mock_cuda_traffic mock_cuda_read(void);
MOCK_CUDA_API void                     mock_cuda_reset(void);

/* Nodes of an op ("GET_ROWS") that the device computed since mock_cuda_reset. */
MOCK_CUDA_API int64_t mock_cuda_nodes(const char * op);
}
