"""The report of what was kept: its numbers are those of the cache, its text is the prompt, and it needs no network."""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from base64 import b64decode
from html.parser import HTMLParser

import numpy as np
import pytest

from pycriticalkv import KVPolicy
from pycriticalkv.evaluation.inspection import Inspection, _binned, _png, inspect_prompt, write_html

NASTY = (
    "</script><script>alert('x')</script> & &amp; <!-- </pre> --> \"quoted\"\n\n"
    "  two  spaces\ttab\r\nwindows\rline\u00a0\u7279\u6b8a\U0001f600 e\u0301 https://example.org/a.js \n"
)


class Page(HTMLParser):
    """What a test wants to know of a page: the prompt's text and spans, tags, and everything that is fetched."""

    VOID = ("meta", "link", "img")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.prompt = ""
        self.spans: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.inside = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [values[name] for name in ("src", "href", "srcset", "action", "data") if name in values]
        if values.get("id") == "prompt":
            self.inside = True
        elif self.inside:
            self.spans.append((values["class"], values["title"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "pre":
            self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.prompt += data


def report(inspection: Inspection, tmp_path) -> tuple[str, Page]:
    path = tmp_path / "kept.html"
    write_html(inspection, path)
    html = path.read_bytes().decode("utf-8")
    page = Page(html)
    assert page.open == []
    assert all(url.startswith("data:") for url in page.fetched)
    assert not re.search(r"@import|url\(", html[: html.index("</style>")])
    assert page.tags.count("script") == 1
    return html, page


def synthetic(n: int, n_layer: int, n_head_kv: int, budget: int) -> Inspection:
    rng = np.random.default_rng(3)
    words = [" the", " lighthouse", ",", "\n", " </script>", "", " \u7279", " keeper", "&amp;", "  "]
    kept = [
        [np.sort(rng.choice(n, budget, replace=False)).astype(np.int32) for _ in range(n_head_kv)]
        for _ in range(n_layer)
    ]
    tokens = [words[i] for i in rng.integers(len(words), size=n)]
    return Inspection("m.gguf", "random", budget, 16, 4, tokens, list(range(n_layer)), kept)


def pixels(png: bytes) -> np.ndarray:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, width, height = 8, b"", 0, 0
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", png, at + 8 + size)[0] == zlib.crc32(kind + body)
        if kind == b"IHDR":
            width, height = struct.unpack_from(">II", body)
        data += body if kind == b"IDAT" else b""
        at += 12 + size
    return np.frombuffer(zlib.decompress(data), dtype=np.uint8).reshape(height, width + 1)[:, 1:]


def test_counts_are_those_of_the_cache(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    prompt = tokens(300)
    seen = inspect_prompt(llm, prompt)
    assert (seen.model, seen.policy, seen.budget) == ("tiny.gguf", "critical-max", 64)
    assert (seen.window, seen.sinks, seen.layers, len(seen.tokens)) == (16, 4, [0, 1, 2], 300)
    counts = np.zeros(300, dtype=int)
    for il, heads in zip(seen.layers, seen.kept, strict=True):
        for mine, positions in zip(heads, llm.kv_positions(il), strict=True):
            assert np.array_equal(mine, positions)
            counts[positions] += 1
    assert np.array_equal(seen.heads_per_token(), counts)
    assert np.array_equal(seen.heads_per_layer().sum(axis=1), [128, 128, 128])
    assert counts.min() == 0 and np.all(counts[:4] == 6) and np.all(counts[-16:] == 6)
    assert seen.share == pytest.approx(64 / 300)


def test_what_was_in_the_cache_does_not_matter(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    first = inspect_prompt(llm, tokens(300)).to_json()
    inspect_prompt(llm, tokens(200, seed=2))
    assert inspect_prompt(llm, tokens(300)).to_json() == first


def test_a_prompt_within_the_budget_is_kept_whole(tiny, load):
    seen = inspect_prompt(load(tiny, kv_budget=64, n_ctx=1024), "the keeper")
    assert seen.share == 1
    assert np.all(seen.heads_per_token() == 6)


@pytest.mark.parametrize(
    "text", ["the keeper of the lighthouse", " space before", "<|user|>hello<|assistant|>", "<s>bos", NASTY * 3]
)
def test_tokens_are_the_text(tiny, load, text):
    seen = inspect_prompt(load(tiny, kv_budget=64, n_ctx=2048), text)
    assert "".join(seen.tokens) == text


def test_bytes_that_are_no_text(tiny, load):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    character = llm.tokenize("\u7279".encode(), add_bos=False)[-3:]
    assert inspect_prompt(llm, character).tokens == ["", "", "\u7279"]
    assert inspect_prompt(llm, character[:2]).tokens == ["", "\ufffd"]


def test_settings_are_named(tiny, load, tokens):
    for policy, name in (
        ("snapkv", "snapkv"),
        (KVPolicy(aggregate="mean"), "criticalkv"),
        (KVPolicy(norm="l1", window=8), "KVPolicy(norm='l1', window=8)"),
    ):
        llm = load(tiny, kv_budget=0.5, kv_policy=policy, n_ctx=1024)
        seen = inspect_prompt(llm, tokens(200))
        assert (seen.policy, seen.budget, len(seen.kept[0][0])) == (name, 100, 100)


def test_layers_that_are_not_evicted_are_left_out(make_tiny, load, tokens, tmp_path):
    llm = load(make_tiny(arch="gemma2"), kv_budget=64, n_ctx=1024)
    seen = inspect_prompt(llm, tokens(200))
    assert seen.layers == llm._kv_store.layers()
    assert 0 < len(seen.layers) < 3
    report(seen, tmp_path)


def test_what_a_user_can_get_wrong(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=256)
    with pytest.raises(RuntimeError, match="kv_budget"):
        inspect_prompt(load(tiny, n_ctx=256), "text")
    for empty in ("", []):
        with pytest.raises(ValueError, match="empty"):
            inspect_prompt(llm, empty)
    with pytest.raises(ValueError, match="300 tokens.*n_ctx=256"):
        inspect_prompt(llm, tokens(300))
    with pytest.raises(ValueError, match="token 100000; allowed are 0 to 447"):
        inspect_prompt(llm, [1, 100000])
    for wrong in (b"bytes", 7, ["a"], None):
        with pytest.raises(TypeError, match="allowed are a str and a list"):
            inspect_prompt(llm, wrong)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        inspect_prompt(llm, "text")


def test_json_round_trip(tiny, load, tokens):
    seen = inspect_prompt(load(tiny, kv_budget=64, n_ctx=1024), tokens(300))
    data = json.loads(json.dumps(seen.to_json()))
    assert data == seen.to_json()
    assert data["format"] == 1
    again = Inspection.from_json(data)
    assert again.to_json() == data
    assert np.array_equal(again.heads_per_token(), seen.heads_per_token())
    with pytest.raises(ValueError, match="format=2"):
        Inspection.from_json({**data, "format": 2})
    with pytest.raises(ValueError, match="missing: policy"):
        Inspection.from_json({name: value for name, value in data.items() if name != "policy"})
    with pytest.raises(ValueError, match="layer 0, head 1"):
        Inspection.from_json({**data, "kept": [[[0, 1], [1, 300]], *data["kept"][1:]]})


def test_pandas_has_a_row_per_entry():
    pytest.importorskip("pandas")
    seen = synthetic(50, 2, 3, 20)
    frame = seen.to_pandas()
    assert list(frame.columns) == ["layer", "head", "position", "token"]
    assert len(frame) == 2 * 3 * 20
    assert frame[(frame.layer == 1) & (frame["head"] == 2)].position.tolist() == seen.kept[1][2].tolist()
    assert frame.token.tolist() == [seen.tokens[p] for p in frame.position]


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        synthetic(50, 2, 3, 20).to_pandas()


def test_report_shows_the_prompt_and_the_counts(tiny, load, tmp_path):
    text = NASTY * 3
    seen = inspect_prompt(load(tiny, kv_budget=64, n_ctx=2048), text)
    html, page = report(seen, tmp_path)
    assert page.prompt == text
    assert "alert('x')" not in html
    assert [title for _, title in page.spans] == [f"{i}: {count}" for i, count in enumerate(seen.heads_per_token())]
    shades = [int(kind.split()[0][1:]) for kind, _ in page.spans]
    counts = seen.heads_per_token()
    assert all((shade == 0) == (count == 0) for shade, count in zip(shades, counts, strict=True))
    assert shades[-1] == 8
    for fact in ("tiny.gguf", "critical-max", "64 entries per KV head", f"{len(seen.tokens):,} tokens"):
        assert fact in html


def test_report_escapes_everything(tmp_path):
    seen = Inspection("<b>.gguf", "a & b", 2, 1, 0, ["a\0b\ud800c", "<i>"], [0], [[np.array([0, 1])]])
    html, page = report(seen, tmp_path)
    assert page.prompt == "a\ufffdb\ufffdc<i>"
    assert "<b>" not in html and "a &amp; b" in html


@pytest.mark.parametrize("n,n_layer", [(1, 1), (700, 3), (5000, 24), (30000, 32)])
def test_the_map_holds_the_shares(tmp_path, n, n_layer):
    seen = synthetic(n, n_layer, 8, max(n // 20, 1))
    _, page = report(seen, tmp_path)
    (image,) = [url for url in page.fetched if url.startswith("data:image/png;base64,")]
    got = pixels(b64decode(image.split(",")[1]))
    columns = min(n, 1200)
    row = got.shape[0] // n_layer
    want = np.zeros((n_layer, columns))
    for i, heads in enumerate(seen.kept):
        for column in range(columns):
            first, last = column * n // columns, (column + 1) * n // columns
            inside = [np.count_nonzero((first <= head) & (head < last)) for head in heads]
            want[i, column] = sum(inside) / (last - first) / 8
    assert got.shape == (n_layer * row, columns)
    # the square root, rounded to one of 255 steps; 1 / 200 and more of the heads is above half a step
    assert np.abs(got[::row] / 255 - np.sqrt(want)).max() < 0.5 / 255 + 1e-12
    assert np.array_equal(got[::row] > 0, want > 0)
    assert page.prompt == "".join(seen.tokens)


def test_a_long_prompt_of_a_large_model_makes_a_small_file(tmp_path):
    seen = synthetic(30000, 32, 8, 1024)
    html, page = report(seen, tmp_path)
    assert len(html.encode()) < 6e6
    assert len(page.spans) == 30000
    assert page.prompt == "".join(seen.tokens)


def test_bins_cover_every_position_once():
    counts = np.arange(21).reshape(1, -1)
    assert _binned(counts, 21).tolist() == counts.tolist()
    assert _binned(counts, 4)[0] @ np.array([5, 5, 5, 6]) == counts.sum()


def test_png():
    image = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert np.array_equal(pixels(_png(image, (1, 2, 3))), image)
