#include "mock-cuda.h"

#include "cuda-rules.h"
#include "cuda-stand-ins.h"
#include "device-memory.h"

#include <cstdlib>
#include <map>
#include <string>

static mock_cuda_traffic                     traffic;
static std::map<ggml_op, int64_t>            nodes_by_op;
static constexpr size_t                      ALIGNMENT     = 128;               // of CUDA's buffer type
static constexpr size_t                      DEVICE_MEMORY = (size_t) 8 << 30;  // what the device claims to have
static constexpr const char * const          NAME          = "MockCUDA0";
static ggml_backend_cuda_context             captured;
static ggml_backend_cuda_device_context      device_context = { 0, 32 };
static ggml_backend_cuda_buffer_type_context buft_context   = { 0 };

struct mock_cuda_traffic mock_cuda_read(void) {
    return traffic;
}

void mock_cuda_reset(void) {
    traffic = {};
    nodes_by_op.clear();
}

int64_t mock_cuda_nodes(const char * op) {
    for (const auto & [which, n] : nodes_by_op) {
        if (std::string(ggml_op_name(which)) == op) {
            return n;
        }
    }
    return 0;
}

// ---- buffers ---------------------------------------------------------------------------------------------------------

static bool is_ours(const ggml_backend_buffer * buffer) {
    return buffer != nullptr && ggml_backend_buft_is_cuda(buffer->buft);
}

static void buffer_free(ggml_backend_buffer_t buffer) {
    device_free(buffer->context);
}

static void * buffer_base(ggml_backend_buffer_t buffer) {
    return buffer->context;
}

static void buffer_memset(ggml_backend_buffer_t, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    const device_access access;
    memset((char *) t->data + offset, value, size);
}

static void buffer_set(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    const device_access access;
    memcpy((char *) t->data + offset, data, size);
    traffic.bytes_up += (int64_t) size;
    traffic.n_up += 1;
}

static void buffer_get(ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    const device_access access;
    memcpy(data, (const char *) t->data + offset, size);
    traffic.bytes_down += (int64_t) size;
    traffic.n_down += 1;
}

// ggml takes get and set where one side is the host
static bool buffer_copy(ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
    if (!is_ours(src->view_src != nullptr ? src->view_src->buffer : src->buffer)) {
        return false;
    }
    const device_access access;
    memmove(dst->data, src->data, ggml_nbytes(src));
    return true;
}

static void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    const device_access access;
    memset(buffer->context, value, buffer->size);
}

static ggml_backend_buffer_i buffer_interface() {
    ggml_backend_buffer_i i = {};
    i.free_buffer           = buffer_free;
    i.get_base              = buffer_base;
    i.memset_tensor         = buffer_memset;
    i.set_tensor            = buffer_set;
    i.get_tensor            = buffer_get;
    i.cpy_tensor            = buffer_copy;
    i.clear                 = buffer_clear;
    return i;
}

static const char * buft_name(ggml_backend_buffer_type_t) {
    return NAME;
}

static ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    void * base = device_alloc(size);
    return base == nullptr ? nullptr : ggml_backend_buffer_init(buft, buffer_interface(), base, size);
}

static size_t buft_alignment(ggml_backend_buffer_type_t) {
    return ALIGNMENT;
}

static ggml_backend_dev_t the_device();

static ggml_backend_buffer_type_t the_buft() {
    // without is_host: the host cannot read it
    static ggml_backend_buffer_type buft = { { buft_name, buft_alloc, buft_alignment, nullptr, nullptr, nullptr },
                                             the_device(),
                                             &buft_context };
    return &buft;
}

bool ggml_backend_buft_is_cuda(ggml_backend_buffer_type_t buft) {
    return buft != nullptr && buft->iface.get_name == buft_name;
}

bool ggml_backend_buft_is_cuda_host(ggml_backend_buffer_type_t) {
    return false;
}

// ---- the backend -----------------------------------------------------------------------------------------------------

// Its context is a CPU backend, which does the work.
static ggml_backend_t worker_of(ggml_backend_t backend) {
    return (ggml_backend_t) backend->context;
}

static const char * backend_name(ggml_backend_t) {
    return NAME;
}

static void backend_free(ggml_backend_t backend) {
    ggml_backend_free(worker_of(backend));
    delete backend;
}

static bool is_view(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE || t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE ||
           t->op == GGML_OP_TRANSPOSE;
}

static bool has_fused_kernels() {
    static const char * fused = std::getenv("MOCK_CUDA_FUSED");
    return fused == nullptr || std::string(fused) != "0";
}

static bool device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    return (op->op != GGML_OP_CUSTOM || has_fused_kernels()) && cuda_supports_op(dev, op);
}

// The scheduler must give the device only what it can do, on what is in its memory.
static void check_node(const ggml_tensor * node) {
    GGML_ASSERT(device_supports_op(the_device(), node));
    GGML_ASSERT(is_ours(node->buffer));
    for (const ggml_tensor * src : node->src) {
        GGML_ASSERT(src == nullptr || is_ours(src->buffer));
    }
}

static ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; ++i) {
        if (!is_view(graph->nodes[i])) {
            check_node(graph->nodes[i]);
            nodes_by_op[graph->nodes[i]->op] += 1;
            traffic.n_nodes += 1;
        }
    }
    (cuda_replays(captured, graph) ? traffic.n_replayed : traffic.n_launched) += 1;
    const device_access access;
    return ggml_backend_graph_compute(worker_of(backend), graph);
}

static ggml_backend_t backend_init(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid = { 'm', 'o', 'c', 'k', ' ', 'C', 'U', 'D', 'A' };
    ggml_backend_i   i    = {};
    i.get_name            = backend_name;
    i.free                = backend_free;
    i.graph_compute       = backend_compute;
    return new ggml_backend{ &guid, i, dev, ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr) };
}

static void set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_reg_t cpu = ggml_backend_dev_backend_reg(ggml_backend_get_device(worker_of(backend)));
    auto * set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(cpu, "ggml_backend_set_n_threads");
    set(worker_of(backend), n_threads);
}

// ---- the device ------------------------------------------------------------------------------------------------------

const ggml_cuda_device_info & ggml_cuda_info() {
    static const char *                cc   = std::getenv("MOCK_CUDA_CC");
    static const ggml_cuda_device_info info = { { { cc == nullptr ? 860 : std::atoi(cc), 99 * 1024, false } } };
    return info;
}

static const char * device_name(ggml_backend_dev_t) {
    return NAME;
}

static void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free  = DEVICE_MEMORY;
    *total = DEVICE_MEMORY;
}

static enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

// Neither asynchronous nor with pinned buffers: every transfer is a plain get or set, which is counted.
static void device_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props              = {};
    props->name         = device_name(dev);
    props->description  = device_name(dev);
    props->type         = device_type(dev);
    props->memory_free  = DEVICE_MEMORY;
    props->memory_total = DEVICE_MEMORY;
}

static ggml_backend_buffer_type_t device_buft(ggml_backend_dev_t) {
    return the_buft();
}

static ggml_backend_reg_t the_reg();

static ggml_backend_dev_t the_device() {
    static ggml_backend_device device = [] {
        ggml_backend_device_i i = {};
        i.get_name              = device_name;
        i.get_description       = device_name;
        i.get_memory            = device_memory;
        i.get_type              = device_type;
        i.get_props             = device_props;
        i.init_backend          = backend_init;
        i.get_buffer_type       = device_buft;
        i.supports_op           = device_supports_op;
        i.supports_buft         = cuda_supports_buft;
        i.offload_op            = cuda_offload_op;
        return ggml_backend_device{ i, the_reg(), &device_context };
    }();
    return &device;
}

// ---- the registry ----------------------------------------------------------------------------------------------------

static const char * reg_name(ggml_backend_reg_t) {
    return "MockCUDA";
}

static size_t reg_device_count(ggml_backend_reg_t) {
    return 1;
}

static ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t) {
    return the_device();
}

static void * reg_proc_address(ggml_backend_reg_t, const char * name) {
    return std::string(name) == "ggml_backend_set_n_threads" ? (void *) set_n_threads : nullptr;
}

static ggml_backend_reg_t the_reg() {
    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION,
                                    { reg_name, reg_device_count, reg_device, reg_proc_address },
                                    nullptr };
    return &reg;
}

// What ggml_backend_load looks for.
extern "C" MOCK_CUDA_API ggml_backend_reg_t ggml_backend_init(void) {
    return the_reg();
}
