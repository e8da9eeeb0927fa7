// Unit tests of the rules by which a layer's graph can be run by itself, on small graphs.

#include "criticalkv-prefill.h"

#include <cassert>
#include <cstdio>
#include <cstring>

namespace {

struct layer_graph {
    ggml_context_ptr    ctx;
    ggml_cgraph *       gf;
    ggml_tensor *       cache;  // of this layer
    ggml_tensor *       other;  // of another layer
    ggml_tensor *       x;
    criticalkv::prefill p;

    layer_graph() {
        ggml_init_params init = { 1 << 20, nullptr, true };
        ctx.reset(ggml_init(init));
        gf             = ggml_new_graph(ctx.get());
        cache          = tensor();
        other          = tensor();
        x              = tensor();
        p.window.layer = 1;
        p.cut          = true;
    }

    ggml_tensor * tensor() { return ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 8); }

    void write(ggml_tensor * to) { add(ggml_cpy(ctx.get(), x, ggml_view_1d(ctx.get(), to, 8, 0))); }

    ggml_tensor * read(ggml_tensor * from) {
        ggml_tensor * sum = ggml_add(ctx.get(), x, ggml_view_1d(ctx.get(), from, 8, 0));
        add(sum);
        return sum;
    }

    void add(ggml_tensor * t) { ggml_build_forward_expand(gf, t); }

    const char * refused() { return criticalkv::refuse_window(p, gf, { cache, other }); }
};

bool says(const char * reason, const char * part) {
    return reason != nullptr && std::strstr(reason, part) != nullptr;
}

}  // namespace

static void test_a_layer_with_its_own_cache() {
    layer_graph g;
    g.write(g.cache);
    g.read(g.cache);
    assert(g.refused() == nullptr);
}

static void test_a_cache_that_another_layer_writes() {
    layer_graph g;
    g.write(g.cache);
    g.read(g.other);
    assert(says(g.refused(), "another layer writes"));
}

static void test_a_read_from_before_the_cut() {
    layer_graph g;
    g.write(g.cache);
    g.p.dropped.insert(g.read(g.cache));
    assert(says(g.refused(), "cache of another layer"));
}

static void test_a_layer_without_an_output() {
    layer_graph g;
    g.p.cut = false;
    assert(says(g.refused(), "does not name the outputs"));
    g.p.window.layer = 0;  // has the embeddings
    assert(g.refused() == nullptr);
}

int main() {
    test_a_layer_with_its_own_cache();
    test_a_cache_that_another_layer_writes();
    test_a_read_from_before_the_cut();
    test_a_layer_without_an_output();
    std::printf("test_window: ok\n");
    return 0;
}
