#include "criticalkv-selection.h"

#include "criticalkv-error.h"
#include "criticalkv-params.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

namespace criticalkv {

// splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014), one step.
static uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

// Uniform in [0, 1), the same for the same seed, layer, head and position.
static double random_score(uint64_t seed, int32_t il, int32_t head, int32_t pos) {
    const uint64_t place = ((uint64_t) (uint32_t) il << 32) | (uint32_t) head;
    return (double) (splitmix64(splitmix64(splitmix64(seed) ^ place) ^ (uint32_t) pos) >> 11) * 0x1.0p-53;
}

// Moves the k best of idx[from..] to the front of that range: highest score first, then lowest index.
static void rank_best(std::vector<int32_t> & idx, size_t from, size_t k, const std::vector<double> & score) {
    if (k == 0 || from + k >= idx.size()) {
        return;
    }
    std::nth_element(idx.begin() + from, idx.begin() + from + k, idx.end(),
                     [&](int32_t a, int32_t b) { return score[a] != score[b] ? score[a] > score[b] : a < b; });
}

// A[i], or for the maximum aggregate R[i] with its mean over all entries before the window as floor (DefensiveKV,
// arXiv 2510.13334, "prior risk").
static std::vector<double> attention_scores(const criticalkv_params & params, const head_entries & e,
                                            int32_t n_before) {
    std::vector<double> score(e.attn, e.attn + n_before);
    if (params.aggregate == CRITICALKV_AGGREGATE_MAX) {
        const double floor = std::accumulate(score.begin(), score.end(), 0.0) / n_before;
        for (double & s : score) {
            s = std::max(s, floor);
        }
    }
    return score;
}

static std::vector<double> first_scores(const criticalkv_params & params, const head_entries & e, int32_t n_before) {
    if (params.score == CRITICALKV_SCORE_WINDOW) {
        return attention_scores(params, e, n_before);
    }
    if (reads_cache(params)) {
        return { e.attn, e.attn + n_before };
    }
    std::vector<double> score(n_before);
    for (int32_t i = 0; i < n_before; ++i) {
        score[i] =
            params.score == CRITICALKV_SCORE_RECENCY ? e.pos[i] : random_score(params.seed, e.il, e.head, e.pos[i]);
    }
    return score;
}

// Scores that weigh values in one stage. With one entry holding all attention, 1 - A is what rounding leaves of it.
static void apply_value_weights(const criticalkv_params & params, const head_entries & e, std::vector<double> & score) {
    constexpr double LEAST_REST = 0x1p-24;
    for (size_t i = 0; i < score.size(); ++i) {
        if (params.value == CRITICALKV_VALUE_CAOTE) {
            score[i] /= std::max(1.0 - score[i], LEAST_REST);
        }
        score[i] *= (double) e.norm[i];
    }
}

std::vector<int32_t> select_entries(const criticalkv_params & params, int32_t budget, const head_entries & e) {
    std::vector<int32_t> kept(e.n);
    std::iota(kept.begin(), kept.end(), 0);
    if (budget >= e.n) {
        return kept;
    }
    if (budget < least_budget(params)) {
        throw error(CRITICALKV_ERR_ARGUMENT, "budget is " + std::to_string(budget) + ", allowed: at least " +
                                                 std::to_string(least_budget(params)) + " (window + sinks + 1)");
    }

    const int32_t n_before = e.n - params.window;
    const int32_t n_sinks  = (int32_t) (std::lower_bound(e.pos, e.pos + n_before, params.sinks) - e.pos);
    const size_t  n_choose = (size_t) (budget - params.window - n_sinks);

    std::vector<int32_t> idx(n_before - n_sinks);
    std::iota(idx.begin(), idx.end(), n_sinks);

    // Stage 1 takes by attention alone; without values it takes all (CriticalKV, arXiv 2502.03805, algorithm 1).
    std::vector<double> score  = first_scores(params, e, n_before);
    const bool          staged = params.value == CRITICALKV_VALUE_CRITICAL;
    if (params.value != CRITICALKV_VALUE_NONE && !staged) {
        apply_value_weights(params, e, score);
    }
    const size_t n_first = staged ? (size_t) std::floor(params.alpha * (double) n_choose) : n_choose;
    rank_best(idx, 0, n_first, score);

    if (staged) {
        // Stage 2: the floor of the maximum aggregate takes the place of eps.
        const double eps = params.aggregate == CRITICALKV_AGGREGATE_MAX ? 0.0 : params.eps;
        for (int32_t i = 0; i < n_before; ++i) {
            score[i] = (score[i] + eps) * (double) e.norm[i];
        }
        rank_best(idx, n_first, n_choose - n_first, score);
    }

    kept.resize(n_sinks);
    kept.insert(kept.end(), idx.begin(), idx.begin() + n_choose);
    std::sort(kept.begin(), kept.end());
    for (int32_t i = n_before; i < e.n; ++i) {
        kept.push_back(i);
    }
    return kept;
}

std::vector<int32_t> share_over_layers(const criticalkv_params & params, int32_t budget,
                                       const std::vector<int32_t> & n) {
    constexpr int64_t    BETA     = 20;
    const int64_t        n_layers = (int64_t) n.size();
    std::vector<int32_t> budgets(n.size(), budget);
    if (params.layers == CRITICALKV_LAYERS_PYRAMID && n_layers > 1) {
        const int64_t mean  = budget - params.window - params.sinks;
        const int64_t least = std::max<int64_t>(1, mean / BETA);
        const int64_t most  = 2 * mean - least;
        const auto    sum   = [&](int64_t i) {  // over the first i layers
            return i * most - (most - least) * i * (i - 1) / (2 * (n_layers - 1));
        };
        for (int64_t i = 0; i < n_layers; ++i) {
            budgets[i] = params.window + params.sinks + (int32_t) (sum(i + 1) - sum(i));
        }
    }
    int64_t left = 0;
    for (int round = 0; round < 2; ++round) {
        for (size_t i = 0; i < n.size(); ++i) {
            const int64_t wanted = budgets[i] + left;
            budgets[i]           = (int32_t) std::min<int64_t>(wanted, n[i]);
            left                 = wanted - budgets[i];
        }
    }
    return budgets;
}

// An entry that heads compete for.
struct candidate {
    double  score;
    int32_t pos;
    int32_t head;
};

static bool ranks_before(const candidate & a, const candidate & b) {
    if (a.score != b.score) {
        return a.score > b.score;
    }
    return a.pos != b.pos ? a.pos < b.pos : a.head < b.head;
}

std::vector<int32_t> share_budget(const criticalkv_params & params, int32_t budget,
                                  const std::vector<head_entries> & heads) {
    std::vector<int32_t> budgets;
    int64_t              total = 0;
    for (const head_entries & e : heads) {
        budgets.push_back(budget);
        total += e.n;
    }
    int64_t left = (int64_t) budget * (int64_t) heads.size();
    if (params.heads != CRITICALKV_HEADS_ADAPTIVE || left >= total) {
        for (size_t h = 0; h < heads.size() && left >= total; ++h) {
            budgets[h] = heads[h].n;
        }
        return budgets;
    }
    const int32_t          mean = budget - params.window - params.sinks;
    const int32_t          own  = std::max(1, (int32_t) std::floor(params.head_floor * mean));
    std::vector<candidate> pool;
    for (size_t h = 0; h < heads.size(); ++h) {
        const head_entries & e        = heads[h];
        const int32_t        n_before = e.n - params.window;
        if (n_before < 1) {  // no more than the window, which stays in any case
            budgets[h] = e.n;
            left -= e.n;
            continue;
        }
        const int32_t        n_sinks = (int32_t) (std::lower_bound(e.pos, e.pos + n_before, params.sinks) - e.pos);
        std::vector<int32_t> idx(n_before - n_sinks);
        std::iota(idx.begin(), idx.end(), n_sinks);
        const std::vector<double> score = first_scores(params, e, n_before);
        const int32_t             mine  = std::min(own, (int32_t) idx.size());
        rank_best(idx, 0, (size_t) mine, score);
        for (size_t i = mine; i < idx.size(); ++i) {
            pool.push_back({ score[idx[i]], e.pos[idx[i]], (int32_t) h });
        }
        budgets[h] = params.window + n_sinks + mine;
        left -= budgets[h];
    }
    const size_t n_best = std::min((size_t) std::max<int64_t>(left, 0), pool.size());
    if (n_best < pool.size()) {
        std::nth_element(pool.begin(), pool.begin() + n_best, pool.end(), ranks_before);
    }
    for (size_t i = 0; i < n_best; ++i) {
        budgets[pool[i].head] += 1;
    }
    return budgets;
}

}  // namespace criticalkv
