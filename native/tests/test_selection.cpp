// Unit tests of the selection and of the parameter checks, without a model.

#include "criticalkv.h"

#include <algorithm>
#include <cassert>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

static criticalkv_params snapkv() {
    criticalkv_params p = criticalkv_params_default();
    p.aggregate         = CRITICALKV_AGGREGATE_MEAN;
    p.value             = CRITICALKV_VALUE_NONE;
    p.window            = 2;
    p.sinks             = 1;
    return p;
}

static std::vector<int32_t> select(const criticalkv_params & p, int32_t budget, const std::vector<float> & attn,
                                   const std::vector<float> & norm) {
    const int32_t        n = (int32_t) attn.size() + p.window;
    std::vector<int32_t> pos(n), out(n);
    std::iota(pos.begin(), pos.end(), 0);
    const int32_t kept = criticalkv_select(&p, budget, 0, 0, n, pos.data(), attn.data(), norm.data(), out.data());
    out.resize(kept < 0 ? 0 : kept);
    return out;
}

static void test_attention_alone() {
    const std::vector<int32_t> want = { 0, 3, 4, 6, 7 };
    assert(select(snapkv(), 5, { 0.0f, 0.1f, 0.2f, 0.9f, 0.3f, 0.3f }, {}) == want);  // 4 before 5: a tie
}

static void test_two_stages() {
    criticalkv_params p = snapkv();
    p.value             = CRITICALKV_VALUE_CRITICAL;
    p.eps               = 0.0;
    // free budget 2: stage 1 takes entry 1 by attention, stage 2 takes entry 4 by attention times norm
    const std::vector<int32_t> want = { 0, 1, 4, 6, 7 };
    assert(select(p, 5, { 0.0f, 0.9f, 0.5f, 0.4f, 0.2f, 0.1f }, { 1.0f, 0.1f, 1.0f, 1.0f, 9.0f, 1.0f }) == want);
    p.alpha                            = 1.0;
    const std::vector<int32_t> by_attn = { 0, 1, 2, 6, 7 };
    assert(select(p, 5, { 0.0f, 0.9f, 0.5f, 0.4f, 0.2f, 0.1f }, { 1.0f, 0.1f, 1.0f, 1.0f, 9.0f, 1.0f }) == by_attn);
}

static void test_floor_of_the_maximum() {
    criticalkv_params p = snapkv();
    p.aggregate         = CRITICALKV_AGGREGATE_MAX;
    p.value             = CRITICALKV_VALUE_CRITICAL;
    p.alpha             = 0.0;
    // entries 2 to 5 are below the mean and so differ by their norms alone
    const std::vector<int32_t> want = { 0, 1, 5, 6, 7 };
    assert(select(p, 5, { 0.8f, 0.8f, 0.01f, 0.02f, 0.03f, 0.001f }, { 1.0f, 1.0f, 1.0f, 1.1f, 1.2f, 1.3f }) == want);
}

static void test_budgets() {
    const std::vector<float> attn = { 0.5f, 0.4f, 0.3f, 0.2f };
    for (int32_t budget = 4; budget <= 8; ++budget) {
        assert((int32_t) select(snapkv(), budget, attn, {}).size() == std::min(budget, 6));
    }
    assert(select(snapkv(), 3, attn, {}).empty());
    assert(std::strstr(criticalkv_last_error(), "budget is 3, allowed: at least 4") != nullptr);
}

static void test_parameters() {
    criticalkv_params p = criticalkv_params_default();
    assert(criticalkv_params_check(&p) == CRITICALKV_OK);
    p.pool = 4;
    assert(criticalkv_params_check(&p) == CRITICALKV_ERR_ARGUMENT);
    assert(std::strcmp(criticalkv_last_error(), "pool is 4, allowed: an odd number from 1 to 63") == 0);
    assert(criticalkv_params_check(nullptr) == CRITICALKV_ERR_ARGUMENT);
    assert(criticalkv_check(nullptr) == CRITICALKV_ERR_ARGUMENT);
}

int main() {
    test_attention_alone();
    test_two_stages();
    test_floor_of_the_maximum();
    test_budgets();
    test_parameters();
    std::puts("selection and parameters: ok");
    return 0;
}
