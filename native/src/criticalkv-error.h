// Errors inside the store are exceptions; the C API turns them into a status and a sentence per thread.
#pragma once

#include "criticalkv.h"

#include <stdexcept>
#include <string>

namespace criticalkv {

struct error : std::runtime_error {
    error(criticalkv_status status, const std::string & what) : std::runtime_error(what), status(status) {}

    criticalkv_status status;
};

// The sentence that criticalkv_last_error() returns on this thread.
void set_last_error(const std::string & text);

}  // namespace criticalkv
