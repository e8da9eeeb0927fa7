// Memory of the mock device: pages that the host cannot touch except through the backend's interface. Code that takes
// a device address for a host address ends in a segmentation fault, as it would with CUDA.
#pragma once

#include <cstddef>

// Page-aligned; nullptr if there is none.
void * device_alloc(size_t size);
void   device_free(void * base);

// While one lives, the memory can be read and written. They nest.
class device_access {
  public:
    device_access();
    ~device_access();
    device_access(const device_access &)             = delete;
    device_access & operator=(const device_access &) = delete;
};
