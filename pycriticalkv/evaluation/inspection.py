"""Which tokens of a prompt did each layer and KV head keep: as data, and as one HTML file to look at.

llm = Llama("model.gguf", kv_budget=1024)
write_html(inspect_prompt(llm, document + question), "kept.html")
"""

from __future__ import annotations

import base64
import codecs
import ctypes
import html
import importlib
import math
import operator
import os
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pycriticalkv import Llama, llama_cpp
from pycriticalkv.policy import PRESETS, KVPolicy

FORMAT = 1
LEVELS = 8  # shades of a token that some head kept
MAP_COLUMNS = 1200  # most columns of the heat map
MAP_COLOUR = (235, 110, 10)  # red, green, blue of the heat map, readable on white and on black


@dataclass(frozen=True, eq=False)
class Inspection:
    """What an evicted cache holds after a prompt of n tokens.

    Attributes:
        model: File name of the model.
        policy: Name of the preset, or the ``KVPolicy`` with what differs from the default.
        budget: Entries per KV head, on average over a layer.
        window: The last entries that are always kept.
        sinks: The first positions that are always kept.
        tokens: [n] text of each position; together they are the prompt. A character of several tokens stands at the
            last of them and the others are empty, as is a token that the prompt did not spell out (BOS). Bytes that are
            not UTF-8 are U+FFFD.
        layers: Layers of the model that are evicted, ascending.
        kept: ``kept[i][head]``: int array of the positions that a KV head of ``layers[i]`` holds, ascending.

    Raises:
        ValueError: ``kept`` does not fit ``layers`` or ``tokens``.
    """

    model: str
    policy: str
    budget: int
    window: int
    sinks: int
    tokens: list[str]
    layers: list[int]
    kept: list[list[npt.NDArray[np.int32]]]

    def __post_init__(self) -> None:
        """Check that the parts fit each other."""
        if len(self.kept) != len(self.layers):
            raise ValueError(f"kept has {len(self.kept)} layers, layers has {len(self.layers)}")
        n = len(self.tokens)
        for il, heads in zip(self.layers, self.kept, strict=True):
            for head, positions in enumerate(heads):
                inside = len(positions) == 0 or (positions[0] >= 0 and positions[-1] < n)
                if not inside or np.any(np.diff(positions) <= 0):
                    raise ValueError(f"kept, layer {il}, head {head}: allowed are ascending positions below {n}")

    @property
    def n_pairs(self) -> int:
        """Number of (layer, KV head) pairs."""
        return sum(len(heads) for heads in self.kept)

    @property
    def share(self) -> float:
        """Entries kept, as a share of those of a full cache."""
        full = len(self.tokens) * self.n_pairs
        return sum(len(positions) for heads in self.kept for positions in heads) / full if full else 0.0

    def heads_per_layer(self) -> npt.NDArray[np.int64]:
        """[layers, n] how many KV heads of each layer kept each position."""
        n = len(self.tokens)
        return np.array(
            [np.bincount(np.concatenate([[], *heads]).astype(np.int64), minlength=n) for heads in self.kept],
            dtype=np.int64,
        ).reshape(len(self.kept), n)

    def heads_per_token(self) -> npt.NDArray[np.int64]:
        """[n] how many (layer, KV head) pairs kept each position."""
        return np.asarray(self.heads_per_layer().sum(axis=0), dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        """Plain types that ``json.dumps`` takes; ``"format"`` is the version of this layout."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["kept"] = [[positions.tolist() for positions in heads] for heads in self.kept]
        return {"format": FORMAT, **plain}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Inspection:
        """The inspection that ``to_json`` wrote.

        Raises:
            ValueError: The data is of another format, incomplete or inconsistent.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"format={data.get('format')!r}: allowed is {FORMAT}")
        missing = [field.name for field in fields(cls) if field.name not in data]
        if missing:
            raise ValueError(f"missing: {', '.join(missing)}")
        values = {field.name: data[field.name] for field in fields(cls)}
        values["kept"] = [[np.asarray(positions, dtype=np.int32) for positions in heads] for heads in data["kept"]]
        return cls(**values)

    def to_pandas(self) -> Any:
        """A DataFrame with one row per layer, head and position kept; columns layer, head, position, token.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as e:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from e
        flat = [(il, head, p) for il, heads in zip(self.layers, self.kept, strict=True) for head, p in enumerate(heads)]
        sizes = [len(positions) for _, _, positions in flat]
        position = np.concatenate([np.empty(0, dtype=np.int64), *(positions for _, _, positions in flat)])
        token = np.empty(len(self.tokens), dtype=object)
        token[:] = self.tokens
        return pandas.DataFrame(
            {
                "layer": np.repeat(np.array([il for il, _, _ in flat], dtype=np.int64), sizes),
                "head": np.repeat(np.array([head for _, head, _ in flat], dtype=np.int64), sizes),
                "position": position,
                "token": token[position],
            }
        )


def inspect_prompt(llm: Llama, prompt: str | list[int]) -> Inspection:
    """Evaluate a prompt and see what was kept.

    What ``llm`` held before is forgotten; afterwards it holds the prompt and can go on from there.

    Args:
        llm: A model with a ``kv_budget``.
        prompt: Text, tokenized as ``create_completion`` does (special tokens understood, BOS added if the model wants
            it), or tokens.

    Raises:
        RuntimeError: ``llm`` has no ``kv_budget`` or is closed.
        TypeError: ``prompt`` is neither a str nor a list of int.
        ValueError: ``prompt`` is empty, longer than ``n_ctx`` or has a token that the model does not know.
    """
    if getattr(llm, "_kv_budget", None) is None:
        raise RuntimeError("inspect_prompt() needs an llm with a kv_budget: Llama(model_path, kv_budget=...)")
    llm.kv_stats()  # raises if the model is closed
    text: bytes | None = None
    tokens: list[int]
    if isinstance(prompt, str):
        text = prompt.encode()
        tokens = llm.tokenize(text, add_bos=True, special=True) if text else []
    else:
        tokens = _token_list(prompt)
    if not tokens:
        raise ValueError("prompt is empty; allowed is text or tokens, at least one")
    if len(tokens) > llm.n_ctx():
        raise ValueError(f"prompt has {len(tokens)} tokens, more than the context window n_ctx={llm.n_ctx()}")
    strange = [token for token in tokens if not 0 <= token < llm.n_vocab()]
    if strange:
        raise ValueError(f"prompt has token {strange[0]}; allowed are 0 to {llm.n_vocab() - 1}")
    llm.reset()
    llm.eval(tokens)
    layers = llm._kv_store.layers()
    return Inspection(
        model=Path(llm.model_path).name,
        policy=_policy_name(llm._kv_policy),
        budget=llm.kv_stats().budget,
        window=llm._kv_policy.window,
        sinks=llm._kv_policy.sinks,
        tokens=_decoded(_pieces(llm, tokens, text)),
        layers=layers,
        kept=[llm.kv_positions(il) for il in layers],
    )


def _token_list(prompt: Sequence[int]) -> list[int]:
    try:
        if isinstance(prompt, bytes | bytearray):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise TypeError(f"prompt is a {type(prompt).__name__}; allowed are a str and a list of int tokens") from None


def _policy_name(policy: KVPolicy) -> str:
    for name, preset in PRESETS.items():
        if policy == preset:
            return name
    default = KVPolicy()
    changed = [f.name for f in fields(policy) if getattr(policy, f.name) != getattr(default, f.name)]
    return f"KVPolicy({', '.join(f'{name}={getattr(policy, name)!r}' for name in changed)})"


def _piece(vocab: Any, token: int, *, special: bool) -> bytes:
    """Bytes of one token. (llama_cpp.Llama.detokenize has room for 32 of them.)"""
    buffer = ctypes.create_string_buffer(64)
    n = llama_cpp.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
    if n < 0:
        buffer = ctypes.create_string_buffer(-n)
        n = llama_cpp.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
    return bytes(buffer.raw[: max(n, 0)])


def _pieces(llm: Llama, tokens: list[int], text: bytes | None) -> list[bytes]:
    """Bytes of each token, without what the tokenizer added to the text: BOS, a space before the first word."""
    vocab = llm._model.vocab
    spelt = {token: _piece(vocab, token, special=True) for token in set(tokens)}
    raw = [spelt[token] for token in tokens]
    if text is None:
        return raw
    pieces: list[bytes] = []
    at = 0
    for token, spelling in zip(tokens, raw, strict=True):
        piece = spelling
        if not text.startswith(piece, at):
            if piece[:1] == b" " and text.startswith(piece[1:], at):
                piece = piece[1:]
            elif not _piece(vocab, token, special=False):
                piece = b""
            else:
                return raw  # the tokenizer changed the text
        pieces.append(piece)
        at += len(piece)
    return pieces if at == len(text) else raw


def _decoded(pieces: list[bytes]) -> list[str]:
    """Text of each piece; a character of several pieces goes to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    last = len(pieces) - 1
    return [decoder.decode(piece, i == last) for i, piece in enumerate(pieces)]


# ---- HTML ------------------------------------------------------------------------------------------------------------


def write_html(inspection: Inspection, path: str | os.PathLike[str]) -> None:
    """Write a report that a browser shows without a network: the prompt's text and a map, shaded by what was kept.

    The text can be copied as the prompt it was, but for characters that HTML cannot hold (NUL, half of a surrogate
    pair), which become U+FFFD.
    """
    title = f"Kept tokens: {inspection.model}, {inspection.policy}, {inspection.budget:,}"
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_escape(title)}</title>\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width">\n<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<style>{STYLE}{_shades()}</style>\n</head>\n<body>\n'
        "<h1>Which tokens were kept</h1>\n",
        _summary(inspection),
        _text(inspection),
        _heat_map(inspection),
        _entries(inspection),
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
    ]
    Path(path).write_bytes("".join(parts).encode("utf-8"))


def _escape(text: str) -> str:
    # a browser turns a plain carriage return into a newline
    return re.sub("[\0\ud800-\udfff]", "\ufffd", html.escape(text)).replace("\r", "&#13;")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.9995 or share == 1 else "almost 100 %"


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _summary(inspection: Inspection) -> str:
    n = len(inspection.tokens)
    counts = inspection.heads_per_token()
    heads = sorted({len(h) for h in inspection.kept})
    uneven = any(len({len(positions) for positions in layer}) > 1 for layer in inspection.kept)
    facts = {
        "Model": inspection.model,
        "Policy": inspection.policy,
        "Budget": f"{inspection.budget:,} entries per KV head{' on average' if uneven else ''}",
        "Always kept": f"first {inspection.sinks:,}, last {inspection.window:,}",
        "Prompt": _plural(n, "token"),
        "Evicted layers": f"{_plural(len(inspection.layers), 'layer')}, "
        f"{' or '.join(map(str, heads)) or 0} KV head{'' if heads == [1] else 's'} each",
        "Kept": f"{_percent(inspection.share)} of all entries"
        + (", nothing was evicted" if inspection.share == 1 else ""),
        "Kept by no head": f"{_plural(int(np.sum(counts == 0)), 'token')}",
        "Kept by every head": f"{_plural(int(np.sum(counts == inspection.n_pairs)), 'token')}",
    }
    rows = "".join(f"<div><dt>{name}</dt><dd>{_escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{rows}</dl>\n"


def _level(count: int, most: int) -> int:
    """Shade of a token that ``count`` of ``most`` heads kept: by the square root, as budgets are small shares.

    Few heads get a shade for every count.
    """
    if most <= LEVELS:
        return round(LEVELS * count / most) if count else 0
    return math.ceil(LEVELS * math.sqrt(count / most) - 1e-9) if count else 0


def _shades() -> str:
    opacity = [0.0, *np.linspace(0.2, 1, LEVELS)]
    return "".join(f".s{i}{{background:rgb(var(--hot)/calc({x:.2f}*var(--most)))}}" for i, x in enumerate(opacity))


def _text(inspection: Inspection) -> str:
    most = inspection.n_pairs
    level = [_level(count, most) for count in range(most + 1)]
    legend = []
    for i in sorted(set(level)):
        first, last = level.index(i), most - level[::-1].index(i)
        legend.append(f'<span class="s{i}">{first:,}</span>' if first == last else _legend_range(i, first, last))
    spans = []
    for position, (piece, count) in enumerate(
        zip(inspection.tokens, inspection.heads_per_token().tolist(), strict=True)
    ):
        mark = " e" if not piece else " n" if "\n" in piece else ""
        spans.append(f'<span class="s{level[count]}{mark}" title="{position}: {count}">{_escape(piece)}</span>')
    return (
        "<h2>Prompt</h2>\n"
        f"<p>Each token is shaded by how many of the {most:,} pairs of layer and KV head kept it; pointing at one "
        "shows <em>position: count</em>. \u21b5 is a newline, \u00b7 a token without text of its own.</p>\n"
        f'<p class="legend">{"".join(legend)}</p>\n'
        f'<pre id="prompt" tabindex="0">{"".join(spans)}</pre>\n'
    )


def _legend_range(level: int, first: int, last: int) -> str:
    return f'<span class="s{level}">{first:,}\u2013{last:,}</span>'


def _png(indices: npt.NDArray[np.uint8], colour: tuple[int, int, int]) -> bytes:
    """A PNG of one colour, [height, width] with its opacity from 0 to 255."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = indices.shape
    rows = np.zeros((height, width + 1), dtype=np.uint8)  # the first byte of a row is its filter: none
    rows[:, 1:] = indices
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        + chunk(b"PLTE", bytes(colour) * 256)
        + chunk(b"tRNS", bytes(range(256)))
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 6))
        + chunk(b"IEND", b"")
    )


def _binned(counts: npt.NDArray[np.int64], columns: int) -> npt.NDArray[np.float64]:
    """[layers, n] to [layers, columns]: means over positions from i * n // columns to (i + 1) * n // columns."""
    edges = np.arange(columns + 1) * counts.shape[1] // columns
    return np.asarray(np.add.reduceat(counts, edges[:-1], axis=1) / np.diff(edges), dtype=np.float64)


def _heat_map(inspection: Inspection) -> str:
    n, n_layers = len(inspection.tokens), len(inspection.layers)
    heading = "<h2>Layers and positions</h2>\n"
    if n == 0 or inspection.n_pairs == 0:
        return heading + "<p>Nothing to show.</p>\n"
    columns = min(n, MAP_COLUMNS)
    heads = np.array([max(len(h), 1) for h in inspection.kept])
    shares = _binned(inspection.heads_per_layer(), columns) / heads[:, None]
    row = max(6, min(20, 360 // n_layers))  # pixels, with one of them between rows
    indices = np.zeros((n_layers, row, columns), dtype=np.uint8)
    indices[:, : row - 1] = np.maximum(np.rint(np.sqrt(shares) * 255), shares > 0).astype(np.uint8)[:, None]
    image = base64.b64encode(_png(indices.reshape(-1, columns), MAP_COLOUR)).decode()

    every = math.ceil(14 / row)
    layer_labels = "".join(
        f'<span style="top:{100 * (i + 0.5) / n_layers:.2f}%">{il}</span>'
        for i, il in enumerate(inspection.layers)
        if i % every == 0
    )
    position_labels = "".join(f'<span style="left:{100 * p / n:.2f}%">{p:,}</span>' for p in range(0, n, _tick(n)))
    scale = "".join(
        f'<span><i style="opacity:{math.sqrt(share):.3f}"></i>{share * 100:g} %</span>'
        for share in (0.01, 0.1, 0.25, 0.5, 1)
    )
    crisp = ' class="crisp"' if columns <= MAP_COLUMNS // 2 else ""
    binned = f", mean over about {n / columns:.0f} positions" if n >= 2 * columns else ""
    return (
        f"{heading}<p>Share of a layer\u2019s KV heads that kept a position{binned}.</p>\n"
        f'<p class="legend scale"><span><i style="opacity:0"></i>none</span>{scale}</p>\n'
        f'<div class="map" data-n="{n}" data-columns="{columns}" data-row="{row}" '
        f'data-layers="{" ".join(map(str, inspection.layers))}">'
        f'<div class="side">Layer</div><div class="layers">{layer_labels}</div>'
        f'<img id="map"{crisp} width="{columns}" height="{n_layers * row}" '
        f'alt="Heat map of layers (down) and positions (across)" src="data:image/png;base64,{image}">'
        f'<div class="positions">{position_labels}</div><div class="below">Position</div></div>\n'
        '<p id="point" hidden>Point at the map to read it, click to go to the token in the prompt.</p>\n'
    )


def _tick(n: int) -> int:
    """Distance of at most twelve labels on an axis of n positions: 1, 2 or 5 times a power of ten."""
    step = 1
    while n > 12 * step:
        first = int(str(step)[0])
        step = step * 5 // 2 if first == 2 else step * 2
    return step


def _entries(inspection: Inspection) -> str:
    sizes = [[len(positions) for positions in heads] for heads in inspection.kept]
    flat = sorted({size for row in sizes for size in row})
    most = max([*flat, 1])
    head = "".join(f'<th scope="col">head {i}</th>' for i in range(max([len(row) for row in sizes], default=0)))
    rows = "".join(
        f'<tr><th scope="row">layer {il}</th>'
        + "".join(f'<td style="--w:{100 * size / most:.1f}%">{size:,}</td>' for size in row)
        + "</tr>\n"
        for il, row in zip(inspection.layers, sizes, strict=True)
    )
    uniform = f"{_plural(flat[0], 'entry').replace('entrys', 'entries')} in every head." if len(flat) == 1 else ""
    varied = f"{flat[0]:,} to {flat[-1]:,} entries per head; a full bar is {most:,}." if len(flat) > 1 else ""
    return (
        f"<h2>Entries per layer and KV head</h2>\n<details{'' if uniform else ' open'}><summary>{uniform or varied}"
        f'</summary>\n<div class="wide"><table><thead><tr><td></td>{head}</tr></thead>\n<tbody>{rows}</tbody></table>'
        "</div></details>\n"
    )


STYLE = """
:root{--ink:#1b1c1e;--soft:#5d6166;--paper:#fff;--panel:#f6f6f4;--line:#d9d9d5;--hot:245 130 32;--most:.95}
@media (prefers-color-scheme:dark){
:root{--ink:#e9e9e6;--soft:#a3a7ad;--paper:#141517;--panel:#1c1d20;--line:#36383d;--hot:226 104 6;--most:.68}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem;max-width:80rem;font:15px/1.5 system-ui,sans-serif;
color:var(--ink);background:var(--paper)}
h1{font-size:1.5rem;margin:0 0 1rem}h2{font-size:1.1rem;margin:2rem 0 .4rem}p{margin:.4rem 0;color:var(--soft)}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:.6rem 1.5rem;margin:0}
dt{font-size:.8rem;color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
pre{margin:.6rem 0;padding:1rem;max-height:70vh;overflow:auto;background:var(--panel);border:1px solid var(--line);
border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.65 ui-monospace,monospace}
pre span{border-radius:3px;box-shadow:inset -1px 0 var(--panel)}pre .s0{color:var(--soft)}
pre .go{outline:2px solid var(--ink)}
.n::before{content:"\\21b5";opacity:.6}.e::before{content:"\\b7";opacity:.6}
.legend{display:flex;flex-wrap:wrap;gap:.3rem;font-size:.8rem;color:var(--ink)}
.legend>span{padding:.1rem .5rem;border:1px solid var(--line);border-radius:3px}
.scale>span{display:inline-flex;align-items:center;gap:.4rem}
.scale i{width:1rem;height:.8rem;background:rgb(MAP_COLOUR)}
.map{display:grid;grid-template:auto auto auto/1.4rem 2rem 1fr;margin-top:.6rem;font-size:.75rem;color:var(--soft);
font-variant-numeric:tabular-nums}
.map img{grid-area:1/3;display:block;width:100%;background:var(--panel);outline:1px solid var(--line)}
.map .crisp{image-rendering:pixelated}
.side{grid-area:1/1;writing-mode:vertical-rl;transform:rotate(180deg);text-align:center}
.layers{grid-area:1/2;position:relative}
.layers span{position:absolute;right:.4rem;transform:translateY(-50%);line-height:1}
.positions{grid-area:2/3;position:relative;height:1.5rem}
.positions span{position:absolute;top:.25rem;transform:translateX(-50%)}
.positions span::before{content:"";position:absolute;left:50%;top:-.25rem;height:.25rem;border-left:1px solid}
.positions span:first-child{transform:none}.positions span:first-child::before{left:0}
.below{grid-area:3/3;text-align:center}
summary{color:var(--soft)}.wide{overflow-x:auto}
table{border-collapse:separate;border-spacing:4px 2px;margin-top:.4rem;font-size:.8rem;
font-variant-numeric:tabular-nums}
th{font-weight:400;color:var(--soft);text-align:left;white-space:nowrap;padding-right:.5rem}
td[style]{min-width:5rem;padding:0 .4rem;
background:linear-gradient(90deg,rgb(var(--hot)/.4) var(--w),var(--panel) var(--w))}
""".replace("MAP_COLOUR", " ".join(map(str, MAP_COLOUR)))

# Only for convenience: what the pointer is on in the map, and the way from there to the token.
SCRIPT = """
"use strict";
(() => {
  const image = document.getElementById("map"), point = document.getElementById("point");
  if (!image) return;
  const {n, columns, row, layers} = image.parentNode.dataset, names = layers.split(" ");
  const canvas = document.createElement("canvas"), pixels = canvas.getContext("2d", {willReadFrequently: true});
  const ready = image.decode().then(() => {
    canvas.width = image.naturalWidth; canvas.height = image.naturalHeight; pixels.drawImage(image, 0, 0);
    point.hidden = false;
  });
  const at = event => {
    const box = image.getBoundingClientRect();
    const cut = (value, most) => Math.max(0, Math.min(most - 1, Math.floor(value * most)));
    const x = cut((event.clientX - box.left) / box.width, +columns);
    const y = cut((event.clientY - box.top) / box.height, names.length);
    return {x, y, first: Math.floor(x * n / columns), last: Math.floor((x + 1) * n / columns) - 1};
  };
  image.addEventListener("pointermove", event => ready.then(() => {
    const {x, y, first, last} = at(event);
    const share = (pixels.getImageData(x, y * row, 1, 1).data[3] / 255) ** 2;
    const where = first < last ? `positions ${first} to ${last}` : `position ${first}`;
    const percent = share && share < 0.01 ? "under 1" : first < last && share ? `about ${Math.round(100 * share)}`
      : Math.round(100 * share);
    point.textContent = `Layer ${names[y]}, ${where}: ${percent} % of the heads`;
  }));
  image.addEventListener("click", event => {
    document.querySelectorAll("#prompt .go").forEach(span => span.classList.remove("go"));
    const {first, last} = at(event), spans = document.getElementById("prompt").children;
    for (let i = first; i <= last; i++) spans[i].classList.add("go");
    spans[first].scrollIntoView({block: "center"});
  });
})();
"""
