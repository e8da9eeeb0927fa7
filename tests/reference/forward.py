"""Forward pass of the tiny llama model in float64, straight from the GGUF file, with visibility per KV head.

After an eviction the product's logits must equal those computed here with the evicted entries invisible. The
arithmetic is that of llama.cpp's llama graph with RoPE mode 0 (NORM: adjacent pairs; the weights of a llama GGUF are
already permuted for it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Visible = ArrayLike | Callable[[int, int, NDArray[np.int64], NDArray[np.int64]], ArrayLike]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x [n, D] divided by its root mean square over D, times weight [D]."""
    return np.asarray(x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * weight)


def rope(x: Array, positions: NDArray[np.int64], freq_base: float) -> Array:
    """Rotate the pairs (2i, 2i + 1) of x [n, H, d] by positions[t] * freq_base ** (-2i / d) radians."""
    d = x.shape[-1]
    frequencies = freq_base ** (-np.arange(0, d, 2) / d)
    angles = positions[:, None, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    even, odd = x[..., 0::2], x[..., 1::2]
    result = np.empty_like(x)
    result[..., 0::2] = even * cos - odd * sin
    result[..., 1::2] = even * sin + odd * cos
    return result


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def to_f16(x: Array) -> Array:
    # By way of float32, since that is what llama.cpp rounds.
    return np.asarray(x.astype(np.float32).astype(np.float16), dtype=np.float64)


@dataclass(frozen=True)
class Layer:
    """What the attention of one layer saw.

    q [n, H_q, d] and k [n, H_kv, d] after RoPE, v [n, H_kv, d], and the softmax weights [H_q, n, n] over query, key.
    """

    q: Array
    k: Array
    v: Array
    attention: Array


def _dequantized(tensor: gguf.ReaderTensor) -> Array:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)


class TinyLlama:
    """The model of a GGUF file of architecture llama without biases, experts or RoPE scaling."""

    def __init__(self, path: str | Path) -> None:
        reader = gguf.GGUFReader(str(path))
        self._fields = reader.fields
        if self._field("general.architecture") != "llama":
            raise ValueError(f"{path}: not a llama model")
        self.n_layer = int(self._field("llama.block_count"))
        self.n_embd = int(self._field("llama.embedding_length"))
        self.n_head = int(self._field("llama.attention.head_count"))
        self.n_head_kv = int(self._field("llama.attention.head_count_kv"))
        self.head_dim = int(self._field("llama.attention.key_length"))
        self.eps = float(self._field("llama.attention.layer_norm_rms_epsilon"))
        self.freq_base = float(self._field("llama.rope.freq_base"))
        self.scale = 1 / np.sqrt(self.head_dim)
        self._weights = {tensor.name: _dequantized(tensor) for tensor in reader.tensors}
        self.layers: list[Layer] = []
        """q, k, v and attention of each layer in the last forward pass."""

    def _field(self, key: str) -> Any:
        return self._fields[key].contents()

    def weight(self, name: str) -> Array:
        """Dequantized values of the tensor `name`, without its suffix .weight, in float64."""
        return self._weights[f"{name}.weight"]

    def wo(self, layer: int) -> Array:
        """Output projection of a layer, [n_embd, n_head * head_dim]."""
        return self.weight(f"blk.{layer}.attn_output")

    def forward(
        self,
        tokens: Sequence[int],
        positions: ArrayLike | None = None,
        visible: Visible | None = None,
        round_f16: bool = True,
    ) -> Array:
        """Logits [n, n_vocab] of n tokens in one pass; `layers` then holds what each attention saw.

        positions [n]: default 0 to n - 1; they need not be contiguous. visible: which keys a query may see in
        addition to causality, as booleans [n_layer, n_head_kv, n, n] (query, key), or a function (layer, KV head,
        query indices [n, 1], key indices [1, n]) -> broadcastable to [n, n]. A query left with no key is an error.
        round_f16: round k and v to float16 as an f16 cache does, and q as the CPU's flash attention does with one.
        llama.cpp also rounds the inputs of quantized matrices; that is not imitated.
        """
        where = np.arange(len(tokens)) if positions is None else np.asarray(positions)
        x = self.weight("token_embd")[np.asarray(tokens)]
        self.layers = []
        for il in range(self.n_layer):
            mask = self._mask(il, where, visible)
            x = x + self._attention(il, self._normed(x, f"blk.{il}.attn_norm"), where, mask, round_f16)
            x = x + self._ffn(il, self._normed(x, f"blk.{il}.ffn_norm"))
        output = "output" if "output.weight" in self._weights else "token_embd"
        return self._multiply(output, self._normed(x, "output_norm"))

    def _normed(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weight(name), self.eps)

    def _multiply(self, name: str, x: Array) -> Array:
        """x [n, in] through the matrix `name` [out, in] -> [n, out]."""
        return np.asarray(x @ self.weight(name).T)

    def _mask(self, il: int, positions: NDArray[np.int64], visible: Visible | None) -> Mask:
        """[n_head_kv, n, n]: True where the query (axis 1) sees the key (axis 2)."""
        n = len(positions)
        shape = (self.n_head_kv, n, n)
        mask = np.broadcast_to(positions[None, :] <= positions[:, None], shape)
        if callable(visible):
            queries, keys = np.arange(n)[:, None], np.arange(n)[None, :]
            allowed = [np.broadcast_to(visible(il, head, queries, keys), (n, n)) for head in range(self.n_head_kv)]
            mask = mask & np.asarray(allowed, dtype=bool)
        elif visible is not None:
            mask = mask & np.broadcast_to(np.asarray(visible, dtype=bool)[il], shape)
        if not mask.any(axis=-1).all():
            raise ValueError(f"layer {il}: a query sees no key at all")
        return mask

    def _heads(self, name: str, x: Array) -> Array:
        return self._multiply(name, x).reshape(len(x), -1, self.head_dim)

    def _attention(self, il: int, x: Array, positions: NDArray[np.int64], mask: Mask, round_f16: bool) -> Array:
        q = rope(self._heads(f"blk.{il}.attn_q", x), positions, self.freq_base)
        k = rope(self._heads(f"blk.{il}.attn_k", x), positions, self.freq_base)
        v = self._heads(f"blk.{il}.attn_v", x)
        if round_f16:
            q, k, v = to_f16(q), to_f16(k), to_f16(v)
        group = self.n_head // self.n_head_kv
        logits = self.scale * np.einsum("mhd,nhd->hmn", q, np.repeat(k, group, axis=1))
        logits = np.where(np.repeat(mask, group, axis=0), logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        self.layers.append(Layer(q, k, v, weights))
        mixed = np.einsum("hmn,nhd->mhd", weights, np.repeat(v, group, axis=1))
        return self._multiply(f"blk.{il}.attn_output", mixed.reshape(len(x), -1))

    def _ffn(self, il: int, x: Array) -> Array:
        gate = silu(self._multiply(f"blk.{il}.ffn_gate", x))
        return self._multiply(f"blk.{il}.ffn_down", gate * self._multiply(f"blk.{il}.ffn_up", x))
