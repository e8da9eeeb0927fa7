// Compaction: the kept rows of K and V of all heads of a layer, as bytes, in one launch.
//
// In place this is safe because slots ascend: row i comes from slots[i] >= i, so whoever writes rows up to i destroys
// nothing that a later row comes from. A block has a few columns of bytes of one head for itself and takes its rows in
// order, a step at a time: all of a step is read before any of it is written. To memory apart from the source, steps are
// independent and several blocks share a column.
//
// Floor: twice the kept bytes over the bandwidth: 0.002 ms on an H200 and 0.017 ms on an RTX 4070 for 1,024 entries in the
// case of docs/performance.md.
#pragma once

#include "criticalkv-device.cuh"

namespace criticalkv {

constexpr int MOVE_THREADS = 256;
constexpr int MOVE_COLUMNS = 4;  // units side by side in a block: 64 bytes, two sectors, with units of 16
constexpr int MOVE_ITEMS   = 8;  // rows per thread and step
constexpr int MOVE_ROWS    = MOVE_THREADS / MOVE_COLUMNS * MOVE_ITEMS;

// Block (columns and share of the steps, KV head, K or V).
template <typename Unit> __global__ void __launch_bounds__(MOVE_THREADS) move_rows(compaction_args p, int shares) {
    const moved_rows rows   = blockIdx.z == 0 ? p.k : p.v;
    const int64_t    column = (int64_t) (blockIdx.x / shares) * MOVE_COLUMNS + threadIdx.x % MOVE_COLUMNS;
    const int64_t    offset = blockIdx.y * rows.head_bytes + column * (int64_t) sizeof(Unit);
    const bool       inside = column * (int64_t) sizeof(Unit) < rows.head_bytes;
    const char *     from   = (const char *) rows.from + offset;
    char *           to     = (char *) rows.to + offset;
    const int32_t *  slots  = p.slots + blockIdx.y * p.n_keep;
    const int64_t    share  = blockIdx.x % shares;
    for (int64_t first = share * MOVE_ROWS; first < p.n_keep; first += (int64_t) shares * MOVE_ROWS) {
        const int64_t row0 = first + threadIdx.x / MOVE_COLUMNS;
        Unit          unit[MOVE_ITEMS];
#pragma unroll
        for (int i = 0; i < MOVE_ITEMS; ++i) {
            const int64_t row = row0 + i * (MOVE_THREADS / MOVE_COLUMNS);
            if (inside && row < p.n_keep) {
                unit[i] = *(const Unit *) (from + slots[row] * rows.from_stride);
            }
        }
        // The next step needs none: its sources are beyond what this one writes.
        __syncthreads();
#pragma unroll
        for (int i = 0; i < MOVE_ITEMS; ++i) {
            const int64_t row = row0 + i * (MOVE_THREADS / MOVE_COLUMNS);
            if (inside && row < p.n_keep) {
                *(Unit *) (to + row * rows.to_stride) = unit[i];
            }
        }
    }
}

// Lowest set bit of all that an address can be made of: rows can be moved in units of so many bytes.
inline uint64_t move_alignment(const compaction_args & p) {
    uint64_t bits = 16;
    for (const moved_rows & rows : { p.k, p.v }) {
        bits |= (uint64_t) rows.from | (uint64_t) rows.to | (uint64_t) rows.from_stride | (uint64_t) rows.to_stride |
                (uint64_t) rows.head_bytes;
    }
    return bits & (~bits + 1);
}

template <typename Unit> cudaError_t launch_move(const compaction_args & p, cudaStream_t stream) {
    const bool         in_place = p.k.from == p.k.to || p.v.from == p.v.to;
    const int64_t      bytes    = p.k.head_bytes > p.v.head_bytes ? p.k.head_bytes : p.v.head_bytes;
    const unsigned     columns  = ceil_div(bytes, (int64_t) sizeof(Unit) * MOVE_COLUMNS);
    const unsigned     shares   = in_place ? 1 : ceil_div(p.n_keep, MOVE_ROWS);
    cudaLaunchConfig_t config   = {};
    config.gridDim              = dim3(columns * shares, (unsigned) p.n_head_kv, 2);
    config.blockDim             = dim3(MOVE_THREADS);
    config.stream               = stream;
    return cudaLaunchKernelEx(&config, move_rows<Unit>, p, (int) shares);
}

inline cudaError_t launch_compaction(const compaction_args & p, cudaStream_t stream) {
    if (p.n_keep == 0) {
        return cudaSuccess;
    }
    switch (move_alignment(p)) {
        case 16:
            return launch_move<uint4>(p, stream);
        case 8:
            return launch_move<uint2>(p, stream);
        case 4:
            return launch_move<uint32_t>(p, stream);
        case 2:
            return launch_move<uint16_t>(p, stream);
        default:
            return cudaErrorInvalidValue;
    }
}

}  // namespace criticalkv
