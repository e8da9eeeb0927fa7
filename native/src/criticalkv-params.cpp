#include "criticalkv-params.h"

#include "criticalkv-error.h"

#include <cmath>
#include <string>

namespace criticalkv {

static thread_local criticalkv_params prepared_params;
static thread_local bool              has_prepared_params = false;

static void require(bool ok, const char * name, double value, const char * allowed) {
    if (ok) {
        return;
    }
    std::string text = std::to_string(value);
    if (value == std::floor(value) && std::fabs(value) < 1e15) {
        text = std::to_string((long long) value);
    }
    throw error(CRITICALKV_ERR_ARGUMENT, std::string(name) + " is " + text + ", allowed: " + allowed);
}

int32_t least_budget(const criticalkv_params & params) {
    return params.window + params.sinks + 1;
}

bool is_uniform(const criticalkv_params & params) {
    return params.heads != CRITICALKV_HEADS_ADAPTIVE && params.layers == CRITICALKV_LAYERS_UNIFORM;
}

bool reads_cache(const criticalkv_params & params) {
    return params.score != CRITICALKV_SCORE_RECENCY && params.score != CRITICALKV_SCORE_RANDOM;
}

void check_params(const criticalkv_params & p) {
    require(p.window >= 1 && p.window <= 256, "window", p.window, "1 to 256");
    require(p.sinks >= 0 && p.sinks <= 4096, "sinks", p.sinks, "0 to 4096");
    require(p.pool >= 1 && p.pool <= 63 && p.pool % 2 == 1, "pool", p.pool, "an odd number from 1 to 63");
    require(p.slack >= 1, "slack", p.slack, "at least 1");
    require(p.alpha >= 0.0 && p.alpha <= 1.0, "alpha", p.alpha, "0 to 1");
    require(p.eps >= 0.0 && std::isfinite(p.eps), "eps", p.eps, "finite, at least 0");
    require(p.score >= CRITICALKV_SCORE_WINDOW && p.score <= CRITICALKV_SCORE_KEYDIFF, "score", p.score, "0 to 4");
    require(p.aggregate >= CRITICALKV_AGGREGATE_MEAN && p.aggregate <= CRITICALKV_AGGREGATE_MAX, "aggregate",
            p.aggregate, "0 or 1");
    require(p.value >= CRITICALKV_VALUE_NONE && p.value <= CRITICALKV_VALUE_CAOTE, "value", p.value, "0 to 3");
    require(p.norm >= CRITICALKV_NORM_GRAM && p.norm <= CRITICALKV_NORM_L1, "norm", p.norm, "0 to 2");
    require(p.heads >= CRITICALKV_HEADS_UNIFORM && p.heads <= CRITICALKV_HEADS_ADAPTIVE, "heads", p.heads, "0 to 2");
    require(p.layers >= CRITICALKV_LAYERS_UNIFORM && p.layers <= CRITICALKV_LAYERS_ADAPTIVE, "layers", p.layers,
            "0 to 2");
    require(p.layers != CRITICALKV_LAYERS_ADAPTIVE || p.heads == CRITICALKV_HEADS_ADAPTIVE, "layers", p.layers,
            "2 for adaptive heads only");
    require(p.head_floor >= 0.0 && p.head_floor <= 1.0, "head_floor", p.head_floor, "0 to 1");
    require(p.measure == 0 || p.measure == 1, "measure", p.measure, "0 or 1");
    require(p.score != CRITICALKV_SCORE_RANDOM || p.heads != CRITICALKV_HEADS_SHARED, "heads", p.heads,
            "not 1 for random scores, which are drawn for each head");
    require(p.value == CRITICALKV_VALUE_NONE || p.heads != CRITICALKV_HEADS_SHARED, "value", p.value,
            "0 where heads share their entries");
    require(p.value == CRITICALKV_VALUE_NONE || p.score == CRITICALKV_SCORE_WINDOW, "value", p.value,
            "0 unless the score is window attention");
    require(p.budget == 0 || p.budget >= least_budget(p), "budget", p.budget, "0, or at least window + sinks + 1");
}

bool store_is_prepared() {
    return has_prepared_params;
}

const criticalkv_params * take_prepared_params() {
    const bool had      = has_prepared_params;
    has_prepared_params = false;
    return had ? &prepared_params : nullptr;
}

}  // namespace criticalkv

criticalkv_params criticalkv_params_default(void) {
    criticalkv_params p{};
    p.budget     = 0;
    p.slack      = 128;
    p.window     = 16;
    p.sinks      = 4;
    p.pool       = 5;
    p.score      = CRITICALKV_SCORE_WINDOW;
    p.aggregate  = CRITICALKV_AGGREGATE_MAX;
    p.value      = CRITICALKV_VALUE_CRITICAL;
    p.norm       = CRITICALKV_NORM_GRAM;
    p.heads      = CRITICALKV_HEADS_UNIFORM;
    p.layers     = CRITICALKV_LAYERS_UNIFORM;
    p.alpha      = 0.5;
    p.eps        = 1e-4;
    p.head_floor = 0.2;
    p.seed       = 0;
    p.measure    = 0;
    return p;
}

int criticalkv_params_check(const criticalkv_params * params) {
    try {
        if (params == nullptr) {
            throw criticalkv::error(CRITICALKV_ERR_ARGUMENT, "params is NULL");
        }
        criticalkv::check_params(*params);
        return CRITICALKV_OK;
    } catch (const criticalkv::error & e) {
        criticalkv::set_last_error(e.what());
        return e.status;
    }
}

int criticalkv_prepare(const criticalkv_params * params) {
    criticalkv::has_prepared_params = false;
    if (params == nullptr) {
        return CRITICALKV_OK;  // the reason why the last context could not be created stays readable
    }
    criticalkv::set_last_error("");
    const int status = criticalkv_params_check(params);
    if (status == CRITICALKV_OK) {
        criticalkv::prepared_params     = *params;
        criticalkv::has_prepared_params = true;
    }
    return status;
}
