// For tests: on which devices the nodes of our graphs are computed, and what is copied between devices for them.
#pragma once

#include "criticalkv.h"
#include "ggml-backend.h"

#include <vector>

namespace criticalkv {

// Graphs of this thread are added to *placement from now on; nullptr: none are.
void watch_placement(criticalkv_placement * placement);

// A graph on its way through the scheduler. Made before the scheduler allocates the graph, which puts copies in the place
// of operands that are on another device than the node.
class placement_record {
  public:
    explicit placement_record(ggml_cgraph * gf);

    // After the allocation.
    void add(ggml_backend_sched_t sched) const;

  private:
    ggml_cgraph *              gf;
    std::vector<ggml_tensor *> operands;  // [node][GGML_MAX_SRC], empty when nobody watches
};

}  // namespace criticalkv
