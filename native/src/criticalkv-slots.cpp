#include "criticalkv-slots.h"

#include "criticalkv-store.h"
#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid.h"

#include <algorithm>
#include <iterator>

namespace criticalkv {

// The other half of the memory that the store's cache is in, which is not evicted.
static llama_kv_cache * sliding_cache(llama_memory_i * memory) {
    auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(memory);
    return iswa != nullptr ? iswa->get_swa() : nullptr;
}

static llama_memory_recurrent * recurrent_states(llama_memory_i * memory) {
    auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory);
    return hybrid != nullptr ? hybrid->get_mem_recr() : nullptr;
}

static std::vector<ggml_tensor *> state_tensors(llama_memory_i * memory) {
    std::vector<ggml_tensor *> all;
    if (const llama_memory_recurrent * r = recurrent_states(memory)) {
        for (const auto * tensors : { &r->r_l, &r->s_l, &r->p_l }) {
            std::copy_if(tensors->begin(), tensors->end(), std::back_inserter(all),
                         [](const ggml_tensor * t) { return t != nullptr; });
        }
    }
    return all;
}

std::vector<llama_kv_cache *> store::caches() const {
    std::vector<llama_kv_cache *> all = { &cache };
    if (llama_kv_cache * swa = sliding_cache(owner.get_memory())) {
        all.push_back(swa);
    }
    return all;
}

slots_snapshot store::take_snapshot() const {
    slots_snapshot s;
    for (const llama_kv_cache * c : caches()) {
        s.cells.push_back(c->v_cells);
        s.heads.push_back(c->v_heads);
    }
    if (const llama_memory_recurrent * r = recurrent_states(owner.get_memory())) {
        s.states = r->cells;
        s.head   = r->head;
        s.used   = r->used;
        s.n      = r->n;
        s.rs_z   = r->rs_z;
    }
    return s;
}

void store::rewind(const slots_snapshot & s) {
    const std::vector<llama_kv_cache *> all = caches();
    for (size_t i = 0; i < all.size(); ++i) {
        all[i]->v_cells = s.cells[i];
        all[i]->v_heads = s.heads[i];
    }
    if (llama_memory_recurrent * r = recurrent_states(owner.get_memory())) {
        r->cells = s.states;
        r->head  = s.head;
        r->used  = s.used;
        r->n     = s.n;
        r->rs_z  = s.rs_z;
    }
}

std::unordered_set<const ggml_tensor *> store::memory_tensors() const {
    std::unordered_set<const ggml_tensor *> all;
    for (const llama_kv_cache * c : caches()) {
        for (const auto & l : c->layers) {
            all.insert({ l.k, l.v });
        }
    }
    for (const layer & l : layers) {
        all.insert({ l.rows.k, l.rows.v });
    }
    const auto states = state_tensors(owner.get_memory());
    all.insert(states.begin(), states.end());
    return all;
}

// llama.cpp warns of tokens that do not follow those of a recurrent state.
void store::place_states(int32_t pos) {
    if (llama_memory_recurrent * r = recurrent_states(owner.get_memory())) {
        for (auto & cell : r->cells) {
            cell.pos = cell.has_seq_id(0) ? pos : cell.pos;
        }
    }
}

void store::forget_overwritten(slots_snapshot & s, int32_t first) {
    const std::vector<llama_kv_cache *> all = caches();
    for (size_t i = 1; i < all.size(); ++i) {
        all[i]->seq_rm(-1, first, -1);
        s.cells[i] = all[i]->v_cells;
    }
}

std::vector<std::vector<uint8_t>> store::read_states() const {
    std::vector<std::vector<uint8_t>> states;
    for (const ggml_tensor * t : state_tensors(owner.get_memory())) {
        states.emplace_back(ggml_nbytes(t));
        ggml_backend_tensor_get(t, states.back().data(), 0, states.back().size());
    }
    return states;
}

void store::write_states(const std::vector<std::vector<uint8_t>> & states) {
    const auto tensors = state_tensors(owner.get_memory());
    for (size_t i = 0; i < tensors.size(); ++i) {
        ggml_backend_tensor_set(tensors[i], states[i].data(), 0, states[i].size());
    }
}

}  // namespace criticalkv
