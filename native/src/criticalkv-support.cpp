// Which models, contexts and cache types can be evicted, and why the others cannot.

#include "criticalkv-store.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <typeinfo>

namespace criticalkv {

// Exactly the type: classes derived from these keep caches of their own in step with the cells.
template <typename T> static T * exactly(llama_memory_i * memory) {
    return memory != nullptr && typeid(*memory) == typeid(T) ? static_cast<T *>(memory) : nullptr;
}

llama_kv_cache * evictable_cache(llama_memory_i * memory) {
    if (auto * hybrid = exactly<llama_memory_hybrid>(memory)) {
        return hybrid->get_mem_attn();
    }
    if (auto * iswa = exactly<llama_kv_cache_iswa>(memory)) {
        return iswa->get_base();
    }
    return exactly<llama_kv_cache>(memory);
}

const char * refuse_memory(llama_memory_i * memory, const llama_model & model, const llama_cparams & cparams) {
    const llama_hparams & hparams = model.hparams;
    if (memory == nullptr) {
        return "the model has no KV cache (encoder only, or a diffusion model)";
    }
    if (llama_model_has_encoder(&model)) {
        return "encoder-decoder models are not supported";
    }
    if (dynamic_cast<llama_memory_recurrent *>(memory) != nullptr) {
        return "the model is recurrent: its memory has a fixed size and no entries to evict";
    }
    if (hparams.is_mla()) {
        return "models with multi-head latent attention (MLA) are not supported";
    }
    if (dynamic_cast<llama_memory_hybrid_iswa *>(memory) != nullptr) {
        return "hybrid models with sliding-window layers are not supported yet";
    }
    if (evictable_cache(memory) == nullptr) {
        return "the model's kind of cache is not supported";
    }
    if (hparams.swa_type != LLAMA_SWA_TYPE_NONE && exactly<llama_kv_cache_iswa>(memory) == nullptr) {
        return "all layers have a sliding window, which already bounds the cache";
    }
    if (hparams.use_alibi || hparams.f_max_alibi_bias > 0.0f) {
        return "models with ALiBi positions are not supported";
    }
    if (hparams.n_pos_per_embd() > 1) {
        return "models with more than one position per token (M-RoPE) are not supported";
    }
    if (hparams.ple_n_heads > 0) {
        return "models whose embeddings read earlier tokens from the cache are not supported";
    }
    if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return "tensors split over several devices (split_mode=3) are not supported; split layers or rows";
    }
    if (!cparams.causal_attn) {
        return "attention is not causal";
    }
    if (cparams.n_seq_max != 1 || cparams.kv_unified) {
        return "only one sequence per context is supported (n_seq_max must be 1, kv_unified false)";
    }
    if (!cparams.flash_attn || cparams.auto_fa) {
        return "flash attention must be on (flash_attn=True), and the model must support it";
    }
    return nullptr;
}

static bool known_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q4_0:
            return true;
        default:
            return false;
    }
}

const char * refuse_layer(const layer & l) {
    if (l.k == nullptr || l.v == nullptr) {
        return "a layer has no V of its own";
    }
    if (!known_type(l.k->type) || !known_type(l.v->type)) {
        return "the cache type must be f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0 (type_k, type_v)";
    }
    if (l.info.n_head_kv == 0) {
        return "some of its layers have a cache without KV heads";
    }
    if (l.info.n_head % l.info.n_head_kv != 0) {
        return "query heads are not a multiple of KV heads";
    }
    const bool words =
        ggml_row_size(l.k->type, l.info.n_embd_k) % 4 == 0 && ggml_row_size(l.v->type, l.info.n_embd_v) % 4 == 0;
    if (!words && !ggml_backend_buft_is_host(l.buft)) {
        return "a head's row is not a multiple of 4 bytes; take another cache type (type_k, type_v)";
    }
    return nullptr;
}

}  // namespace criticalkv
