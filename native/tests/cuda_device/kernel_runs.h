// Where a test's kernels run: on a CUDA device. The file of this name in cuda_shim/ is for the host.
#pragma once

#include "../require.h"

#include <cuda_runtime.h>

namespace cases {

inline int64_t n_launches = 0;

inline int64_t launches() {
    return n_launches;
}

inline void finish(cudaError_t status) {
    n_launches += 1;
    status = status == cudaSuccess ? cudaDeviceSynchronize() : status;
    require(status == cudaSuccess, std::string("the launch failed: ") + cudaGetErrorString(status));
}

// A device orders its threads as it likes, so a kernel runs several times; what it leaves in memory must be the same,
// bit for bit. `run` returns it.
template <typename Run> auto under_all_schedules(const std::string & what, const Run & run) {
    const auto first = run();
    for (int i = 0; i < 5; ++i) {
        require(same_bytes(first, run()), what + ": two runs differ");
    }
    return first;
}

// Memory of the device with copies of host memory, until the end of the scope.
class device_memory {
  public:
    device_memory()                      = default;
    device_memory(const device_memory &) = delete;

    ~device_memory() {
        for (void * block : blocks) {
            cudaFree(block);
        }
    }

    template <typename T> T * put(const std::vector<T> & from) {
        void * block = nullptr;
        check(cudaMalloc(&block, std::max<size_t>(from.size() * sizeof(T), 1)));
        blocks.push_back(block);
        check(cudaMemcpy(block, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
        return (T *) block;
    }

    template <typename T> void get(const T * from, std::vector<T> & to) const {
        check(cudaMemcpy(to.data(), from, to.size() * sizeof(T), cudaMemcpyDeviceToHost));
    }

  private:
    static void check(cudaError_t status) {
        require(status == cudaSuccess, std::string("memory of the device: ") + cudaGetErrorString(status));
    }

    std::vector<void *> blocks;
};

}  // namespace cases
