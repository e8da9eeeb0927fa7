#include "criticalkv-placement.h"

#include "ggml.h"

#include <cstdio>
#include <set>

namespace criticalkv {

static thread_local criticalkv_placement * watched = nullptr;

void watch_placement(criticalkv_placement * placement) {
    watched = placement;
}

placement_record::placement_record(ggml_cgraph * gf) : gf(gf) {
    if (watched == nullptr) {
        return;
    }
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * const * src = ggml_graph_node(gf, i)->src;
        operands.insert(operands.end(), src, src + GGML_MAX_SRC);
    }
}

static bool computes(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return false;
        default:
            return true;
    }
}

static bool is_on_cpu(ggml_backend_sched_t sched, ggml_tensor * node) {
    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(sched, node);
    return ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

static void add_node(ggml_backend_sched_t sched, ggml_tensor * node) {
    watched->n_nodes += 1;
    if (!is_on_cpu(sched, node)) {
        return;
    }
    if (watched->n_nodes_cpu++ == 0) {
        const ggml_tensor * operand = node->src[0] == nullptr ? node : node->src[0];
        std::snprintf(watched->first, sizeof(watched->first), "%s %s %s", ggml_op_desc(node),
                      ggml_type_name(node->type), ggml_type_name(operand->type));
    }
}

void placement_record::add(ggml_backend_sched_t sched) const {
    if (watched == nullptr || operands.empty()) {
        return;
    }
    std::set<const ggml_tensor *> copies;
    watched->n_graphs += 1;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * node = ggml_graph_node(gf, i);
        if (computes(node)) {
            add_node(sched, node);
        }
        for (int j = 0; j < GGML_MAX_SRC; ++j) {
            const ggml_tensor * before = operands[(size_t) i * GGML_MAX_SRC + j];
            // several nodes may share a copy
            if (node->src[j] == before || !copies.insert(node->src[j]).second) {
                continue;
            }
            if ((before->flags & GGML_TENSOR_FLAG_INPUT) != 0) {
                watched->n_inputs += 1;
                watched->bytes_inputs += (int64_t) ggml_nbytes(before);
            } else {
                watched->n_copies += 1;
            }
        }
    }
}

}  // namespace criticalkv
