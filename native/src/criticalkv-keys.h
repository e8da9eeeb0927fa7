// Scores that need nothing but the keys, as the cache holds them: no query observes.
#pragma once

#include "criticalkv-store.h"

namespace criticalkv {

// Higher stays, to out[heads][n_before]:
//   CRITICALKV_SCORE_KEY_NORM  -|k[i]|_2
//   CRITICALKV_SCORE_KEYDIFF   -cos(k[i], mean over all n entries j of k[j] / |k[j]|_2)
// Keys are those after RoPE. A rotation of quantized caches changes neither.
void key_scores(llama_context & lctx, int32_t score, const layer & l, const head_range & of, int64_t n_before,
                float * out);

}  // namespace criticalkv
