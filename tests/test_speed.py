"""Measuring speed and memory: what is measured and how it is put together, never how fast it is."""

from __future__ import annotations

import pytest

from pycriticalkv.evaluation import Speed, measure_speed, speed_rows
from pycriticalkv.evaluation.speed import speed_table

THREADS = {"n_threads": 1, "n_threads_batch": 1}


def test_every_side_at_every_length(tiny):
    measured = list(measure_speed(tiny, [200, 600], [64, 0.5], turns=2, tokens_per_turn=3, **THREADS))
    sides = [(64, True), (0.5, True), (None, True), (None, False)]
    assert [(s.n_tokens, s.budget, s.flash_attn) for s in measured] == [
        *((200, *side) for side in sides),
        *((600, *side) for side in sides[::-1]),
    ]
    for s in measured:
        assert len(s.decode_seconds) == 2 and all(seconds > 0 for seconds in s.decode_seconds)
        assert 0 <= s.eviction_seconds < s.prefill_seconds
        assert (s.eviction_seconds > 0) == (s.budget is not None)
    by_side = {(s.n_tokens, s.budget): s.cache_bytes for s in measured}
    per_token = 3 * 2 * 2 * 32 * 2  # layers, K and V, heads, numbers, bytes
    assert by_side[600, None] == 600 * per_token
    assert by_side[600, 64] == 128 * per_token  # budget and slack, padded
    assert 300 * per_token <= by_side[600, 0.5] <= 400 * per_token


def test_lengths_that_do_not_fit_can_be_left_out(tiny):
    measured = list(measure_speed(tiny, [100, 9000], [64], turns=1, tokens_per_turn=1, skip_longer=True, **THREADS))
    assert {s.n_tokens for s in measured} == {100}


def test_quantized_values_need_flash_attention(tiny):
    measured = list(measure_speed(tiny, [100], [64], turns=1, tokens_per_turn=1, type_k=8, type_v=8, **THREADS))
    assert [(s.budget, s.flash_attn) for s in measured] == [(64, True), (None, True)]


def test_rows_compare_with_the_faster_full_cache():
    def side(budget, flash_attn, seconds, n_bytes):
        return Speed(100, budget, flash_attn, 2.0, 0.1 if budget else 0.0, seconds, n_bytes)

    measured = [side(64, True, (0.5, 1.0, 0.5), 25), side(None, True, (2.0, 2.0, 4.0), 100),
                side(None, False, (1.0, 1.5, 2.0), 100)]  # fmt: skip
    full, row = speed_rows(measured)
    assert (full.budget, full.flash_attn, full.decode_ratio, full.cache_share) == (None, False, 1.0, 1.0)
    assert (row.decode_rate, row.decode_ratio, row.decode_ratio_low, row.decode_ratio_high) == (2.0, 2.0, 1.5, 4.0)
    assert row.cache_share == 0.25
    assert len(speed_table([full, row]).splitlines()) == 4


@pytest.mark.parametrize(
    "arguments,why",
    [
        ({"n_tokens": [0]}, "n_tokens=0"),
        ({"n_tokens": [True]}, "n_tokens=True"),
        ({"turns": 0}, "turns=0"),
        ({"tokens_per_turn": -1}, "tokens_per_turn=-1"),
        ({"n_tokens": []}, "n_tokens"),
        ({"budgets": []}, "at least one"),
        ({"n_tokens": [100, 100]}, "each once"),
        ({"budgets": [64, 64]}, "each once"),
        ({"budgets": [1]}, "kv_budget=1"),
        ({"n_tokens": [9000]}, "the model's context is 8192"),
        ({"text": ""}, "no tokens"),
        ({"text": b"abc"}, "text=b'abc': allowed are None and a str"),
        ({"n_tokens": 100}, "n_tokens=100: allowed is a list, a tuple or a range"),
        ({"n_tokens": ["100"]}, "n_tokens='100': allowed is an int"),
        ({"budgets": None}, "budgets=None: allowed is a list, a tuple or a range"),
    ],
)
def test_arguments_are_checked(tiny, arguments, why):
    given = {"n_tokens": [100], "budgets": [64], **arguments}
    with pytest.raises((ValueError, TypeError), match=why):
        list(measure_speed(tiny, given.pop("n_tokens"), given.pop("budgets"), **given, **THREADS))
