// Parameters: defaults, ranges, and those that wait for the next context of this thread.
#pragma once

#include "criticalkv.h"

namespace criticalkv {

// Throws error(CRITICALKV_ERR_ARGUMENT) that names the parameter, its value and what is allowed.
void check_params(const criticalkv_params & params);

// Least budget that leaves one entry to choose.
int32_t least_budget(const criticalkv_params & params);

// Whether all heads of all layers keep the same number of entries.
bool is_uniform(const criticalkv_params & params);

// Whether scores come from keys (and queries); the others are made of positions alone.
bool reads_cache(const criticalkv_params & params);

// Whether the next context of this thread gets a store: its cache then leaves the memory of K and V to the store.
bool store_is_prepared();

// Parameters that criticalkv_prepare left for the next context of this thread, or nullptr. Taking them clears them.
const criticalkv_params * take_prepared_params();

}  // namespace criticalkv
