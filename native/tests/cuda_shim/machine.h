// Runs CUDA kernels on the host, for tests: every thread of a block is a fiber, and a schedule says in which order the fibers
// go from one barrier to the next. What a kernel computes must not depend on the schedule; where it does, it has a race.
//
// Blocks run one after the other. A fiber runs until it meets a barrier or an operation of its warp. Found and reported as
// `failure`: a block barrier that some threads never reach, or that threads reach in different lines; lanes of a warp in
// different operations. Shared memory is a heap block of just its size, full of NaNs at the start of every block, so the
// address sanitizer sees what is out of bounds and results show what was not written.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_SHIM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_SHIM_ASAN 1
#endif
#endif

#ifdef CUDA_SHIM_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

struct dim3 {
    unsigned x, y, z;

    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct uint3 {
    unsigned x, y, z;
};

inline uint3 threadIdx;
inline uint3 blockIdx;
inline dim3  blockDim;
inline dim3  gridDim;

namespace cuda_shim {

struct failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct schedule {
    bool     reverse = false;  // blocks, warps and lanes from the last to the first
    bool     ahead   = false;  // a warp runs up to the block barrier before the next one starts
    uint32_t seed    = 0;      // not 0: any order, drawn anew for every round
};

inline const char * const BLOCK_BARRIER = "__syncthreads";

class machine {
  public:
    schedule order;
    int64_t  launches = 0;

    template <typename Kernel> void run(dim3 grid, dim3 block, const Kernel & kernel) {
        if (block.y != 1 || block.z != 1 || block.x % 32 != 0 || block.x > 1024) {
            throw failure("the shim runs blocks of whole warps in one dimension");
        }
        launches += 1;
        random.seed(order.seed);
        gridDim  = grid;
        blockDim = block;
        job      = { [](const void * k) { (*(const Kernel *) k)(); }, &kernel };
        std::vector<int64_t> blocks((int64_t) grid.x * grid.y * grid.z);
        sort(blocks);
        for (const int64_t i : blocks) {
            blockIdx = { (unsigned) (i % grid.x), (unsigned) (i / grid.x % grid.y), (unsigned) (i / grid.x / grid.y) };
            run_block(block.x);
        }
    }

    // ---- called by the threads of a kernel ---------------------------------------------------------------------------

    void block_barrier(int line) {
        thread & t = *threads[threadIdx.x];
        t.line     = line;
        wait(BLOCK_BARRIER);
    }

    // All lanes of `mask` come here with the same `what` and an operand each; the last to come does `act` for all of them.
    template <typename Operand>
    void warp_meeting(const char * what, unsigned mask, Operand * mine, void (*act)(Operand * const * all)) {
        const unsigned warp = threadIdx.x / 32 * 32;
        thread &       t    = *threads[threadIdx.x];
        t.operand           = mine;
        t.mask              = mask;
        t.waits_for         = what;
        Operand * all[32]   = {};
        bool      complete  = (mask >> threadIdx.x % 32 & 1) != 0;
        for (unsigned lane = 0; lane < 32; ++lane) {
            if ((mask >> lane & 1) == 0) {
                continue;
            }
            const thread & other = *threads[warp + lane];
            complete             = complete && other.waits_for == what && other.mask == mask;
            all[lane]            = (Operand *) other.operand;
        }
        if (complete) {
            act(all);
            for (unsigned lane = 0; lane < 32; ++lane) {
                if ((mask >> lane & 1) != 0) {
                    threads[warp + lane]->waits_for = nullptr;
                }
            }
        }
        leave();
    }

    // The block's memory of one variable, which `key` stands for.
    void * shared(const void * key, size_t bytes, size_t alignment) {
        auto & memory = variables[key];
        if (!memory) {
            memory.reset(std::aligned_alloc(alignment, bytes));
            std::memset(memory.get(), 0xFF, bytes);
        }
        return memory.get();
    }

  private:
    static constexpr size_t STACK = 64 * 1024;  // the address sanitizer clears its map of it at every switch

    struct thread {
        ucontext_t   context;
        void *       stack     = nullptr;
        bool         done      = true;
        const char * waits_for = nullptr;
        int          line      = 0;  // of a block barrier
        unsigned     mask      = 0;  // of an operation of the warp
        void *       operand   = nullptr;
        void *       fake      = nullptr;  // the sanitizer's stack of this fiber

        ~thread() {
            if (stack != nullptr) {
                munmap(stack, STACK);
            }
        }
    };

    struct free_memory {
        void operator()(void * p) const { std::free(p); }
    };

    struct task {
        void (*call)(const void *);
        const void * kernel;
    };

    template <typename T> void sort(std::vector<T> & numbers) {
        std::iota(numbers.begin(), numbers.end(), T(0));
        if (order.seed != 0) {
            std::shuffle(numbers.begin(), numbers.end(), random);
        } else if (order.reverse) {
            std::reverse(numbers.begin(), numbers.end());
        }
    }

    void run_block(unsigned n) {
        variables.clear();
        while (threads.size() < n) {
            threads.push_back(make_thread());
        }
        for (unsigned i = 0; i < n; ++i) {
            threads[i]->done      = false;
            threads[i]->waits_for = nullptr;
        }
        std::vector<unsigned> warps(n / 32);
        std::vector<unsigned> lanes(32);
        while (true) {
            bool any = false;
            sort(warps);
            for (const unsigned warp : warps) {
                do {
                    sort(lanes);
                    any |= run_lanes(warp * 32, lanes);
                } while (order.ahead && is_ready(warp * 32));
            }
            if (!any && !release(n)) {
                return;
            }
        }
    }

    bool is_ready(unsigned first) const {
        return std::any_of(threads.begin() + first, threads.begin() + first + 32,
                           [](const auto & t) { return !t->done && t->waits_for == nullptr; });
    }

    // Lets each lane that can run do so until it waits again.
    bool run_lanes(unsigned first, const std::vector<unsigned> & lanes) {
        bool any = false;
        for (const unsigned lane : lanes) {
            thread & t = *threads[first + lane];
            if (!t.done && t.waits_for == nullptr) {
                threadIdx = { first + lane, 0, 0 };
                enter(t);
                any = true;
            }
        }
        return any;
    }

    // Opens the block barrier when all wait there; false when all are done.
    bool release(unsigned n) {
        unsigned done = 0;
        for (unsigned i = 0; i < n; ++i) {
            done += threads[i]->done ? 1 : 0;
        }
        if (done == n) {
            return false;
        }
        for (unsigned i = 0; i < n; ++i) {
            const thread & t = *threads[i];
            if (t.done || t.waits_for != BLOCK_BARRIER || t.line != threads[0]->line) {
                fail(n, i);
            }
        }
        for (unsigned i = 0; i < n; ++i) {
            threads[i]->waits_for = nullptr;
        }
        return true;
    }

    [[noreturn]] void fail(unsigned n, unsigned which) {
        std::string said;
        for (const unsigned i : { 0u, which }) {
            const thread & t = *threads[i];
            said += (said.empty() ? "thread " : ", thread ") + std::to_string(i) +
                    (t.done ? " has ended" : " waits in " + std::string(t.waits_for));
            said += t.done || t.waits_for != BLOCK_BARRIER ? "" : " of line " + std::to_string(t.line);
        }
        threads.clear();  // their fibers are stuck
        throw failure("divergent barrier in a block of " + std::to_string(n) + ": " + said);
    }

    void wait(const char * what) {
        threads[threadIdx.x]->waits_for = what;
        leave();
    }

    // ---- fibers ------------------------------------------------------------------------------------------------------

    std::unique_ptr<thread> make_thread() {
        auto t   = std::make_unique<thread>();
        t->stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (t->stack == MAP_FAILED) {
            t->stack = nullptr;
            throw failure("no memory for the stack of a thread");
        }
        getcontext(&t->context);
        t->context.uc_stack.ss_sp   = t->stack;
        t->context.uc_stack.ss_size = STACK;
        t->context.uc_link          = nullptr;
        makecontext(&t->context, fiber, 0);
        return t;
    }

    // Serves one kernel after the other.
    static void fiber();

    void enter(thread & t) {
        current = &t;
#ifdef CUDA_SHIM_ASAN
        __sanitizer_start_switch_fiber(&fake, t.stack, STACK);
#endif
        swapcontext(&home, &t.context);
#ifdef CUDA_SHIM_ASAN
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    }

    void leave() {
        thread & t = *current;
#ifdef CUDA_SHIM_ASAN
        __sanitizer_start_switch_fiber(&t.fake, home_stack, home_size);
#endif
        swapcontext(&t.context, &home);
#ifdef CUDA_SHIM_ASAN
        __sanitizer_finish_switch_fiber(t.fake, &home_stack, &home_size);
#endif
    }

    std::vector<std::unique_ptr<thread>>                       threads;
    std::map<const void *, std::unique_ptr<void, free_memory>> variables;
    std::mt19937                                               random;
    task                                                       job     = {};
    thread *                                                   current = nullptr;
    ucontext_t                                                 home;
    void *                                                     fake       = nullptr;
    const void *                                               home_stack = nullptr;
    size_t                                                     home_size  = 0;
};

inline machine the_machine;

inline void machine::fiber() {
    machine & m = the_machine;
#ifdef CUDA_SHIM_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &m.home_stack, &m.home_size);
#endif
    while (true) {
        m.job.call(m.job.kernel);
        m.current->done = true;
        m.leave();
    }
}

}  // namespace cuda_shim
