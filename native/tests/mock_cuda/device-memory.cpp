#include "device-memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

namespace {

struct device_pages {
    std::recursive_mutex     mutex;
    std::map<void *, size_t> blocks;  // base -> bytes
    int                      depth = 0;

    void protect(int protection) {
        for (const auto & [base, bytes] : blocks) {
            if (mprotect(base, bytes, protection) != 0) {
                std::perror("mprotect");
                std::abort();
            }
        }
    }
};

// never destroyed: buffers may be freed after static objects are
device_pages & pages() {
    static device_pages * all = new device_pages;
    return *all;
}

}  // namespace

void * device_alloc(size_t size) {
    const std::lock_guard lock(pages().mutex);
    const size_t          page  = (size_t) sysconf(_SC_PAGESIZE);
    const size_t          bytes = (std::max<size_t>(size, 1) + page - 1) / page * page;
    const int             open  = pages().depth > 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
    void *                base  = mmap(nullptr, bytes, open, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    pages().blocks[base] = bytes;
    return base;
}

void device_free(void * base) {
    const std::lock_guard lock(pages().mutex);
    munmap(base, pages().blocks.at(base));
    pages().blocks.erase(base);
}

device_access::device_access() {
    pages().mutex.lock();
    if (pages().depth++ == 0) {
        pages().protect(PROT_READ | PROT_WRITE);
    }
}

device_access::~device_access() {
    if (--pages().depth == 0) {
        pages().protect(PROT_NONE);
    }
    pages().mutex.unlock();
}
