// What an eviction changes in one layer: the worst case that the norms' argument allows, and the truth.
//
// A[i] is the attention an entry gets, s the share of a sink logit (0 without), S what is kept, W a query head's block of
// W_O. Entries dropped take A with them, delta = sum of A over the dropped; those kept grow from A to
// A / (sigma + s), sigma = sum of A over S, because 1 - delta = sigma + s. So the output o = sum A[i] v[i] W changes by
//
//     sum_S (1 / (sigma + s) - 1) A[i] v[i] W  -  sum_dropped A[i] v[i] W,
//
// and in any norm by no more than, with N[i] = |v[i] W| and C = sum of A N over all entries,
//
//     (1 / (sigma + s) - 1) sum_S A N + sum_dropped A N   =   C - (2 - 1 / (sigma + s)) sum_S A N.
//
// The left side is computed, with 1 / (sigma + s) - 1 = delta / (sigma + s): nothing cancels when little is lost.
//
// bound: the sum of this over KV heads, over the sum of C. A is the mean attention of the observing queries and of the
// query heads of a KV head, without pool and with the window, N the policy's norm, a mean over the same heads; so it bounds
// the change of that attention's output (|.|_1 for the L1 norm, |.|_2 for the others), relative to the most that this
// output could be, not to what it is, since terms of different entries and heads may cancel there. That is why `change`
// can be larger. Between 0 and about 2; 2 is all values lost and as much gained elsewhere.
//
// change: mean over the observing queries of |o' - o|_2 / |o|_2, o the sum over all query heads, each with its own attention
// (soft-cap, sink logits and causal mask as in the model), o' with softmax over S only, which holds per KV head. The bias
// of the projection is not part of o. Weights change by a' - a = a' delta on S and by -a elsewhere, a' softmax over S: each
// factor is exact to rounding whether delta is near 0 or near 1.
#pragma once

#include "criticalkv.h"

#include <limits>
#include <vector>

struct llama_context;

namespace criticalkv {

struct layer;
struct lora_part;
struct observation;

// What an eviction changes in one layer; NaN: not measured.
struct measurement {
    double bound  = std::numeric_limits<double>::quiet_NaN();
    double change = std::numeric_limits<double>::quiet_NaN();
};

// observed: of all KV heads together. keep: slots that stay, ascending, per KV head.
measurement measure_change(llama_context & lctx, const criticalkv_params & params, layer & l,
                           const std::vector<observation> & observed, const std::vector<lora_part> & loras,
                           const std::vector<std::vector<int32_t>> & keep);

}  // namespace criticalkv
