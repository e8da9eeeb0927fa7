// Where a test's kernels run: here on the host, thread by thread, in several orders. The file of this name in cuda_device/ is for a
// real device.
#pragma once

#include "../require.h"
#include <cuda_runtime.h>

namespace cases {

inline const cuda_shim::schedule SCHEDULES[] = {
    { false, false, 0 }, { true, false, 0 },  { false, true, 0 },
    { true, true, 0 },   { false, false, 7 }, { false, true, 8 },
};

// Runs a kernel under every schedule; what it leaves in memory must be the same, bit for bit. `run` returns it.
template <typename Run> auto under_all_schedules(const std::string & what, const Run & run) {
    decltype(run()) first;
    for (const cuda_shim::schedule & order : SCHEDULES) {
        cuda_shim::the_machine.order = order;
        decltype(run()) result;
        try {
            result = run();
        } catch (const cuda_shim::failure & e) {
            require(false, what + ": " + e.what());
        }
        if (&order == &SCHEDULES[0]) {
            first = std::move(result);
            continue;
        }
        require(same_bytes(first, result), what + ": the result depends on the order of threads (schedule " +
                                               std::to_string(&order - SCHEDULES) + ")");
    }
    return first;
}

inline int64_t launches() {
    return cuda_shim::the_machine.launches;
}

inline void finish(cudaError_t status) {
    require(status == cudaSuccess, "the launch failed");
}

// Memory that a kernel works in: copies of host memory, each in a block of just its size, until the end of the scope.
class device_memory {
  public:
    template <typename T> T * put(const std::vector<T> & from) {
        std::unique_ptr<char[]> & block = blocks.emplace_back(new char[from.size() * sizeof(T)]);
        std::memcpy(block.get(), from.data(), from.size() * sizeof(T));
        return (T *) block.get();
    }

    template <typename T> void get(const T * from, std::vector<T> & to) const {
        std::memcpy(to.data(), from, to.size() * sizeof(T));
    }

  private:
    std::vector<std::unique_ptr<char[]>> blocks;  // aligned for every type of a kernel, as new is
};

}  // namespace cases
