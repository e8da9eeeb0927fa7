// Parameters: defaults, ranges, and those that wait for the next context of this thread.
#pragma once

#include "criticalkv.h"

namespace criticalkv {

// Throws error(CRITICALKV_ERR_ARGUMENT) that names the parameter, its value and what is allowed.
void check_params(const criticalkv_params & params);

// Least budget that leaves one entry to choose.
int32_t least_budget(const criticalkv_params & params);

// Parameters that criticalkv_prepare left for the next context of this thread, or nullptr. Taking them clears them.
const criticalkv_params * take_prepared_params();

}  // namespace criticalkv
