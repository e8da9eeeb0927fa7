// All parts of a context's memory: the cache that is evicted, a sliding half (iSWA), recurrent states (hybrid).
#pragma once

#include "llama-kv-cells.h"
#include "llama-memory-recurrent.h"

#include <cstdint>
#include <vector>

namespace criticalkv {

// Which slots are taken, in all of them. Setting them back forgets what was written since, as long as it did not take the
// place of what was there: that happens in recurrent states and where a window slides.
struct slots_snapshot {
    std::vector<std::vector<llama_kv_cells>>      cells;
    std::vector<std::vector<uint32_t>>            heads;
    std::vector<llama_memory_recurrent::mem_cell> states;
    uint32_t                                      head = 0, used = 0, n = 0;
    int32_t                                       rs_z = -1;
};

}  // namespace criticalkv
