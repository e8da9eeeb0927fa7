"""Write tiny GGUF models with random weights, for tests.

The llama variant loads in a millisecond, tokenizes any text and has attention that is peaky enough for an eviction to
matter. The others exist so that tests can see how models of other kinds are treated:

    qwen2                  biases on queries, keys and values
    qwen3, qwen3moe        norms on queries and keys; experts (qwen3moe)
    gemma2                 sliding window, soft-caps on the attention logits and on the final ones
    gemma3                 sliding window, norms on queries and keys
    gpt-oss                sliding window, attention sinks, biases, experts
    lfm2, granitehybrid    attention in every second layer, short convolution or Mamba2 in the others
    mamba                  a recurrent state and no attention
    bloom                  ALiBi
    deepseek2              latent attention
    t5                     encoder and decoder

    python models/tiny.py tiny.gguf --seed 1 --n-head-kv 1

The same arguments give the same bytes. write_tiny_lora writes a LoRA adapter for such a model.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from numpy.typing import NDArray

Floats = NDArray[np.float32]

N_VOCAB = 448
# SentencePiece's mark of a space, with which a word begins.
WORD = "\u2581"
TURN_END = "<|turn|>"
SPECIALS = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", TURN_END)
# Turns are set apart by tokens of their own and nothing is trimmed: the prompt of a later turn then begins with the
# very text of the earlier prompt and its answer.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}" + TURN_END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Only its letter pairs matter: the word pieces are learnt from it.
SAMPLE = """
the keeper of the lighthouse wrote down the weather every evening before the lamp was lit. there was wind from the west
and rain in the morning, and the ships that were waiting in the harbour could not leave. when the sea was calm he would
read the letters that came with the boat, and answer each of them with care. the answer to most questions, he thought,
was to be found in what other people had already forgotten. where is the key to the small door? it is under the stone
near the garden wall, where the children left it last summer. what did she say about the bread? that one should never
count the loaves before they are baked. a long memory is a fine thing to have, but it is better to know which things to
remember and which to let go. she kept the first page and the last page, and the few pages between that said something.
"""

# Standard deviation of the attention logits: at 2.2 the softmax of a long row has only about a hundredth of its
# entries as effective support.
LOGIT_STD = 2.2
# The first channel of the residual stream is this constant in every layer, so that a column of the output matrix can
# raise or lower a token's logit whatever the context.
CONSTANT = 2.0
NEVER = -45.0
# Positions that a layer with a sliding window sees.
WINDOW = 64
N_EXPERT, N_EXPERT_USED = 4, 2
# The experts of a token are chosen by this many channels, which hold the same in every layer.
ROUTER_CHANNELS = 8
# llama.cpp builds these with query heads that fill the width of the model.
FULL_WIDTH = ("qwen2", "lfm2")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, in the words of llama.cpp."""

    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_embd: int
    n_ff: int
    n_ctx: int


def write_tiny(
    path: str | Path,
    *,
    arch: str = "llama",
    seed: int = 0,
    n_layer: int = 3,
    n_head: int = 8,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_embd: int = 128,
    n_ff: int = 96,
    n_ctx: int = 8192,
    wo_type: str = "F16",
    weight_type: str = "F16",
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Write a random model of architecture `arch` to `path`.

    wo_type is the type of the attention output matrix and weight_type that of all other matrices: F32, F16, BF16,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, and for rows of a multiple of 256 also Q4_K and Q6_K. To compare logits closely, take
    F32 or F16: for the other types llama.cpp rounds the activations as well, and errors of 1 % are ordinary. The
    architectures other than llama derive what they need from these sizes; those of FULL_WIDTH are n_head * head_dim
    wide whatever n_embd says.
    """
    if arch not in BUILDERS:
        raise ValueError(f"unknown architecture {arch!r}; known: {', '.join(BUILDERS)}")
    if n_head % n_head_kv:
        raise ValueError("n_head must be a multiple of n_head_kv")
    if arch in FULL_WIDTH:
        n_embd = n_head * head_dim
    shape = Shape(n_layer, n_head, n_head_kv, head_dim, n_embd, n_ff, n_ctx)
    file = _File(arch, seed, wo_type, weight_type)
    _add_sizes(file, shape)
    add_vocabulary(file.writer, chat_template)
    BUILDERS[arch](file, shape)
    file.save(Path(path))
    return Path(path)


def write_tiny_lora(
    path: str | Path,
    base_path: str | Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ("attn_q", "attn_v", "attn_output"),
) -> Path:
    """Write a LoRA adapter for the tiny model at `base_path` to `path`.

    It has factors for the matrices named by `targets`, in every layer that has one. Each adds alpha / rank / 4 standard
    deviations to a matrix's output for inputs of unit variance: at the defaults, a third of what a query has.
    """
    base = gguf.GGUFReader(str(base_path))
    architecture = base.get_field("general.architecture")
    if architecture is None:
        raise ValueError(f"{base_path} does not name its architecture")
    file = _File(architecture.contents(), seed, "F32", "F32")
    file.writer.add_type(gguf.GGUFType.ADAPTER)
    file.writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    file.writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    endings = tuple(f".{target}.weight" for target in targets)
    tensors = [tensor for tensor in base.tensors if tensor.name.endswith(endings)]
    if not tensors:
        raise ValueError(f"{base_path} has none of the matrices {', '.join(targets)}")
    for tensor in tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        n_out, n_in = weights.shape
        b = file.normal(n_out, rank, std=0.25 * rank**-0.5)
        # What the model keeps out of some channels of the residual stream, the adapter must keep out as well.
        b[~weights.any(axis=1)] = 0
        file.vector(f"{tensor.name}.lora_a", file.normal(rank, n_in, std=n_in**-0.5))
        file.vector(f"{tensor.name}.lora_b", b)
    file.save(Path(path))
    return Path(path)


class _File:
    """A GGUF writer and a random generator, and the kinds of tensors that models are made of."""

    def __init__(self, arch: str, seed: int, wo_type: str, weight_type: str) -> None:
        self.writer = gguf.GGUFWriter(None, arch)
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.wo_type = GGMLQuantizationType[wo_type]
        self.weight_type = GGMLQuantizationType[weight_type]
        self.writer.add_name(f"tiny random {arch}, seed {seed}")

    def normal(self, *shape: int, std: float = 1.0) -> Floats:
        return (std * self.random.standard_normal(shape)).astype(np.float32)

    def spread(self, n: int, sigma: float) -> Floats:
        """Positive factors with a median of 1 and a long tail (log-normal)."""
        return np.exp(self.normal(n, std=sigma))

    def matrix(self, name: str, values: Floats, qtype: GGMLQuantizationType | None = None) -> None:
        """Add a weight [out, in], or [n, out, in], in the file's type for weights."""
        qtype = self.weight_type if qtype is None else qtype
        self.writer.add_tensor(f"{name}.weight", _encode(values, qtype), raw_dtype=qtype)

    def dense(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        """Add a random matrix that maps inputs of unit variance to outputs of standard deviation `gain`."""
        self.matrix(name, self.normal(n_out, n_in, std=gain / n_in**0.5))

    def vector(self, name: str, values: Floats) -> None:
        self.writer.add_tensor(name, values.astype(np.float32))

    def norm(self, name: str, n: int, bias: bool = False) -> None:
        self.vector(f"{name}.weight", 1 + self.normal(n, std=0.1))
        if bias:
            self.vector(f"{name}.bias", self.normal(n, std=0.1))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.writer.write_header_to_file(path)
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


# --- number formats ---------------------------------------------------------------------------------------------


def _encode(values: Floats, qtype: GGMLQuantizationType) -> NDArray[Any]:
    if qtype == GGMLQuantizationType.F32:
        return values
    if qtype == GGMLQuantizationType.F16:
        return values.astype(np.float16)
    if qtype in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K):
        # The gguf package reads the K formats but does not write them.
        if values.shape[-1] % 256:
            raise ValueError(f"{qtype.name} needs rows of a multiple of 256, not {values.shape[-1]}")
        encode = _encode_q4_k if qtype == GGMLQuantizationType.Q4_K else _encode_q6_k
        return encode(values.reshape(-1, 256)).reshape(*values.shape[:-1], -1)
    quantized: NDArray[Any] = gguf.quants.quantize(values, qtype)
    return quantized


def _ratio(values: Floats, scale: Floats) -> Floats:
    """values / scale, and 0 where the scale is 0."""
    return np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)


def _half_bytes(values: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    return values.astype(np.float16).view(np.uint8)


def _encode_q6_k(blocks: Floats) -> NDArray[np.uint8]:
    """Q6_K, blocks [n, 256] -> [n, 210]: 16 groups of 16 six-bit numbers, an int8 scale each and one f16 scale."""
    groups = blocks.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(axis=-1) / 31
    d = (wanted.max(axis=-1, keepdims=True) / 127).astype(np.float16)
    scales = np.rint(_ratio(wanted, np.broadcast_to(d.astype(np.float32), wanted.shape)))
    steps = (scales * d.astype(np.float32))[..., None]
    codes = np.clip(np.rint(_ratio(groups, np.broadcast_to(steps, groups.shape))), -32, 31) + 32
    # Each half of 128 numbers is four runs of 32: nibbles of runs 0 and 2, then 1 and 3, share bytes; so do the
    # upper two bits of all four.
    runs = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = runs & 15, runs >> 4
    ql = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=-1)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    n = len(blocks)
    parts = [ql.reshape(n, 128), qh.reshape(n, 64), scales.astype(np.int8).view(np.uint8), _half_bytes(d)]
    return np.concatenate(parts, axis=-1)


def _encode_q4_k(blocks: Floats) -> NDArray[np.uint8]:
    """Q4_K, blocks [n, 256] -> [n, 144]: 8 groups of 32 nibbles, six-bit scale and minimum each, two f16 scales."""
    groups = blocks.reshape(-1, 8, 32)
    lowest = np.maximum(-groups.min(axis=-1), 0)
    wanted = (groups.max(axis=-1) + lowest) / 15
    d, scales = _six_bit(wanted)
    dmin, minimums = _six_bit(lowest)
    shifted = groups + (minimums * dmin.astype(np.float32))[..., None]
    steps = np.broadcast_to((scales * d.astype(np.float32))[..., None], groups.shape)
    codes = np.clip(np.rint(_ratio(shifted, steps)), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    s, m = scales.astype(np.uint8), minimums.astype(np.uint8)
    # Groups 4 to 7 have their upper two bits in the free bits of groups 0 to 3.
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    quants = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([_half_bytes(d), _half_bytes(dmin), *packed, quants], axis=-1)


def _six_bit(values: Floats) -> tuple[NDArray[np.float16], Floats]:
    scale = (values.max(axis=-1, keepdims=True) / 63).astype(np.float16)
    codes = np.rint(_ratio(values, np.broadcast_to(scale.astype(np.float32), values.shape)))
    return scale, np.clip(codes, 0, 63)


# --- vocabulary -------------------------------------------------------------------------------------------------


def _word_pieces(count: int) -> list[str]:
    """The letters of SAMPLE, then the pieces of a byte-pair encoding learnt from it, `count` in all.

    llama.cpp builds a piece out of two pieces that are in the vocabulary, and byte-pair encoding gives just that.
    """
    words = Counter(tuple(WORD + word) for word in SAMPLE.split())
    pieces = sorted({letter for word in words for letter in word})
    while len(pieces) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if "".join(best) not in pieces:
            pieces.append("".join(best))
        words = Counter({_merged(word, best): times for word, times in words.items()})
    return pieces


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    result: list[str] = []
    for piece in word:
        if result and (result[-1], piece) == pair:
            result[-1] += piece
        else:
            result.append(piece)
    return tuple(result)


@cache
def _tokens() -> tuple[str, ...]:
    """All tokens in the order of their ids: <unk>, the special ones, the bytes, the pieces."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    fixed = ["<unk>", *SPECIALS, *bytes_]
    return (*fixed, *_word_pieces(N_VOCAB - len(fixed)))


def add_vocabulary(writer: gguf.GGUFWriter, chat_template: str | None, n_unused: int = 0) -> None:
    """The vocabulary of the tiny models, N_VOCAB tokens and then n_unused that no text has."""
    tokens = _tokens()
    types = [TokenType.UNKNOWN] + [TokenType.CONTROL] * len(SPECIALS) + [TokenType.BYTE] * 256
    n_pieces = len(tokens) - len(types)
    unused = [f"<unused {i}>" for i in range(n_unused)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, *unused])
    # The earlier a piece was learnt, the sooner llama.cpp merges it.
    writer.add_token_scores([0.0] * len(types) + [-float(rank) for rank in range(n_pieces)] + [0.0] * n_unused)
    writer.add_token_types(types + [TokenType.NORMAL] * n_pieces + [TokenType.UNUSED] * n_unused)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    # Without it, text that is tokenized and put together again is the same text.
    writer.add_add_space_prefix(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _token_bias() -> Floats:
    """Bias of each token's logit that leaves only word beginnings to be generated.

    Generation then never ends early, is valid UTF-8, and tokenizes back to the very tokens that were generated, as
    nothing can merge across the beginning of a word.
    """
    return np.array([0 if token.startswith(WORD) else NEVER for token in _tokens()], np.float32)


# --- architectures ----------------------------------------------------------------------------------------------


def _add_sizes(file: _File, shape: Shape) -> None:
    writer = file.writer
    writer.add_vocab_size(N_VOCAB)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)


def _add_attention_sizes(file: _File, shape: Shape, attention: Sequence[bool] | None = None) -> None:
    """Sizes of the attention, which only the layers marked in `attention` have, if it is given."""
    writer = file.writer
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv if attention is None else [shape.n_head_kv * here for here in attention])
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)


def _add_embeddings(file: _File, shape: Shape, norm: str = "output_norm", bias: bool = False) -> None:
    """Token embedding, last norm and output matrix, with the constant channel at both ends."""
    embedding = file.normal(N_VOCAB, shape.n_embd)
    embedding[:, 0] = CONSTANT
    file.matrix("token_embd", embedding)
    file.norm(norm, shape.n_embd, bias)
    output = file.normal(N_VOCAB, shape.n_embd, std=2.5 / shape.n_embd**0.5)
    output[:, 0] = _token_bias() / CONSTANT
    file.matrix("output", output)


def _to_residual(values: Floats, kept: int = 1) -> Floats:
    """Keep a matrix that adds to the residual stream out of the constant channel, or the first `kept` channels."""
    values[..., :kept, :] = 0
    return values


def _add_attention(
    file: _File,
    shape: Shape,
    prefix: str,
    names: tuple[str, str, str, str],
    *,
    logit_std: float = LOGIT_STD,
    kept: int = 1,
    n_bias: int = 0,
) -> None:
    """Wq, Wk, Wv, Wo. Value norms differ between tokens, and those of their projections between heads as well.

    `kept` is that of _to_residual, and the first `n_bias` of the four have a bias.
    """
    d, d_q, d_kv = shape.n_embd, shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    file.dense(f"{prefix}.{names[0]}", d_q, d, gain=logit_std**0.5)
    file.dense(f"{prefix}.{names[1]}", d_kv, d, gain=logit_std**0.5)
    # A few input channels carry most of a value, so its norm follows the token and does not average out.
    channels = file.spread(d, 1.2)
    channels *= (d / np.square(channels).sum()) ** 0.5
    file.matrix(f"{prefix}.{names[2]}", file.normal(d_kv, d, std=d**-0.5) * channels)
    # The inputs of Wo differ in weight, so the plain norm of a value is no substitute for the projected one.
    inputs = file.spread(d_q, 1.0)
    inputs *= (d_q / np.square(inputs).sum()) ** 0.5
    wo = file.normal(d, d_q, std=2 * d_q**-0.5) * inputs
    file.matrix(f"{prefix}.{names[3]}", _to_residual(wo, kept), file.wo_type)
    # Values average out over a row of attention and their bias does not, so it is small: else the last layer would
    # favour the same few tokens in any context.
    biases = [file.normal(n, std=std) for n, std in ((d_q, 0.2), (d_kv, 0.2), (d_kv, 0.1), (d, 0.1))[:n_bias]]
    for name, bias in zip(names, biases, strict=False):
        if name == names[3]:
            bias[:kept] = 0
        file.vector(f"{prefix}.{name}.bias", bias)


def _add_head_norms(file: _File, shape: Shape, prefix: str) -> None:
    """Norms on q and k. They set the size of the logits: head_dim**0.5 times the product of both gains."""
    gain = LOGIT_STD**0.5
    file.vector(f"{prefix}.attn_q_norm.weight", gain + file.normal(shape.head_dim, std=0.1))
    file.vector(f"{prefix}.attn_k_norm.weight", gain + file.normal(shape.head_dim, std=0.1))


def _add_ffn(file: _File, shape: Shape, prefix: str, gated: bool = True) -> None:
    if gated:
        file.dense(f"{prefix}.ffn_gate", shape.n_ff, shape.n_embd)
    file.dense(f"{prefix}.ffn_up", shape.n_ff, shape.n_embd)
    down = file.normal(shape.n_embd, shape.n_ff, std=shape.n_ff**-0.5)
    file.matrix(f"{prefix}.ffn_down", _to_residual(down))


def _expert_width(shape: Shape) -> int:
    """A third of n_ff or so, and a multiple of 32 for the sake of quantized weights."""
    return 32 * max(1, shape.n_ff // 96)


def _add_expert_sizes(file: _File, shape: Shape) -> None:
    file.writer.add_expert_count(N_EXPERT)
    file.writer.add_expert_used_count(N_EXPERT_USED)
    file.writer.add_expert_feed_forward_length(_expert_width(shape))


def _add_experts(file: _File, shape: Shape, prefix: str, bias: bool = False) -> None:
    """Feed-forward networks of which each token passes through some.

    The router reads only channels that no layer adds to, so a token's embedding alone decides on its experts. Else
    rounding would swap experts now and then, which makes a jump in the logits, and these could not be compared.
    """
    d, width, kept = shape.n_embd, _expert_width(shape), 1 + ROUTER_CHANNELS
    router = np.zeros((N_EXPERT, d), np.float32)
    router[:, 1:kept] = file.normal(N_EXPERT, ROUTER_CHANNELS, std=1.5 * ROUTER_CHANNELS**-0.5)
    file.matrix(f"{prefix}.ffn_gate_inp", router, GGMLQuantizationType.F32)
    for name in ("ffn_gate_exps", "ffn_up_exps"):
        file.matrix(f"{prefix}.{name}", file.normal(N_EXPERT, width, d, std=d**-0.5))
    down = file.normal(N_EXPERT, d, width, std=1.5 * width**-0.5)
    file.matrix(f"{prefix}.ffn_down_exps", _to_residual(down, kept))
    if bias:
        # Zero, or the size of the other channels would have a say in the choice of the experts.
        file.vector(f"{prefix}.ffn_gate_inp.bias", np.zeros(N_EXPERT, np.float32))
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            file.vector(f"{prefix}.{name}.bias", file.normal(N_EXPERT, width, std=0.1))
        down_bias = file.normal(N_EXPERT, d, std=0.1)
        down_bias[:, :kept] = 0
        file.vector(f"{prefix}.ffn_down_exps.bias", down_bias)


SELF_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")


def _add_plain_layers(file: _File, shape: Shape, n_bias: int = 0) -> None:
    """Attention and feed-forward network, a norm before each; the first n_bias of Wq, Wk, Wv, Wo have a bias."""
    _add_embeddings(file, shape)
    for il in range(shape.n_layer):
        file.norm(f"blk.{il}.attn_norm", shape.n_embd)
        _add_attention(file, shape, f"blk.{il}", SELF_ATTENTION, n_bias=n_bias)
        file.norm(f"blk.{il}.ffn_norm", shape.n_embd)
        _add_ffn(file, shape, f"blk.{il}")


def _llama(file: _File, shape: Shape) -> None:
    _add_attention_sizes(file, shape)
    file.writer.add_layer_norm_rms_eps(1e-5)
    file.writer.add_rope_dimension_count(shape.head_dim)
    file.writer.add_rope_freq_base(10000.0)
    _add_plain_layers(file, shape)


def _qwen2(file: _File, shape: Shape) -> None:
    _add_attention_sizes(file, shape)
    file.writer.add_layer_norm_rms_eps(1e-6)
    file.writer.add_rope_freq_base(1000000.0)
    _add_plain_layers(file, shape, n_bias=3)


def _qwen3(file: _File, shape: Shape, experts: bool = False) -> None:
    _add_attention_sizes(file, shape)
    if experts:
        _add_expert_sizes(file, shape)
    file.writer.add_layer_norm_rms_eps(1e-6)
    file.writer.add_rope_freq_base(1000000.0)
    _add_embeddings(file, shape)
    for il in range(shape.n_layer):
        file.norm(f"blk.{il}.attn_norm", shape.n_embd)
        _add_head_norms(file, shape, f"blk.{il}")
        _add_attention(file, shape, f"blk.{il}", SELF_ATTENTION, kept=1 + ROUTER_CHANNELS if experts else 1)
        file.norm(f"blk.{il}.ffn_norm", shape.n_embd)
        if experts:
            _add_experts(file, shape, f"blk.{il}")
        else:
            _add_ffn(file, shape, f"blk.{il}")


def _qwen3moe(file: _File, shape: Shape) -> None:
    _qwen3(file, shape, experts=True)


def _gpt_oss(file: _File, shape: Shape) -> None:
    """Layers 0, 2, ... have a sliding window, which llama.cpp takes for granted."""
    _add_attention_sizes(file, shape)
    _add_expert_sizes(file, shape)
    file.writer.add_layer_norm_rms_eps(1e-5)
    file.writer.add_rope_dimension_count(shape.head_dim)
    file.writer.add_rope_freq_base(150000.0)
    file.writer.add_sliding_window(WINDOW)
    _add_embeddings(file, shape)
    for il in range(shape.n_layer):
        prefix = f"blk.{il}"
        file.norm(f"{prefix}.attn_norm", shape.n_embd)
        _add_attention(file, shape, prefix, SELF_ATTENTION, kept=1 + ROUTER_CHANNELS, n_bias=4)
        # A few hundred logits of LOGIT_STD add up to about exp(8), so a sink takes a tenth of the weight, and more of
        # it within a window.
        file.vector(f"{prefix}.attn_sinks.weight", 6 + file.normal(shape.n_head))
        # By this name llama.cpp calls what is the norm before the experts.
        file.norm(f"{prefix}.post_attention_norm", shape.n_embd)
        _add_experts(file, shape, prefix, bias=True)


def _gemma2(file: _File, shape: Shape) -> None:
    """Layers 0, 2, ... have a sliding window, which llama.cpp takes for granted."""
    _add_attention_sizes(file, shape)
    file.writer.add_layer_norm_rms_eps(1e-6)
    file.writer.add_rope_freq_base(10000.0)
    file.writer.add_sliding_window(WINDOW)
    # The cap cuts the peaks, which is made up for by logits twice as large as those of other models.
    file.writer.add_attn_logit_softcapping(10.0)
    file.writer.add_final_logit_softcapping(15.0)
    _add_tied_embeddings(file, shape)
    for il in range(shape.n_layer):
        prefix = f"blk.{il}"
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            file.norm(f"{prefix}.{name}", shape.n_embd)
        _add_attention(file, shape, prefix, SELF_ATTENTION, logit_std=2 * LOGIT_STD, kept=2)
        _add_tied_ffn(file, shape, prefix, last=il == shape.n_layer - 1)


def _add_tied_embeddings(file: _File, shape: Shape) -> None:
    """Token embedding that is the output matrix as well, and multiplied by n_embd**0.5 at the input.

    Channel 0 is the constant one. Channel 1 has the bias of the tokens: 0 or -1 at the input, it is raised above 0 by
    the last layer, so that -1 lowers a token's logit at the output.
    """
    d = shape.n_embd
    embedding = file.normal(N_VOCAB, d)
    embedding[:, 0] = CONSTANT
    embedding[:, 1] = _token_bias() / -NEVER
    file.matrix("token_embd", embedding * d**-0.5)
    # Signs differ, or the last token would have the highest logit by far, as its embedding is in the residual stream.
    norm = 2.5 * file.spread(d, 0.1) * np.sign(file.normal(d))
    norm[0] = 0
    # By then the channel is about as large as the root mean square of all.
    norm[1] = -NEVER * d**0.5
    file.vector("output_norm.weight", norm)


def _add_tied_ffn(file: _File, shape: Shape, prefix: str, last: bool) -> None:
    """Feed-forward network that adds to channel 1 in the last layer: a unit that reads nothing but the constant."""
    gate, up = (file.normal(shape.n_ff, shape.n_embd, std=shape.n_embd**-0.5) for _ in range(2))
    down = _to_residual(file.normal(shape.n_embd, shape.n_ff, std=shape.n_ff**-0.5), kept=2)
    if last:
        for matrix in (gate, up):
            matrix[0] = 0
            matrix[0, 0] = CONSTANT
        down[1, 0] = 1
    for name, matrix in (("ffn_gate", gate), ("ffn_up", up), ("ffn_down", down)):
        file.matrix(f"{prefix}.{name}", matrix)


def _gemma3(file: _File, shape: Shape) -> None:
    """Every second layer has a sliding window."""
    _add_attention_sizes(file, shape)
    file.writer.add_layer_norm_rms_eps(1e-6)
    file.writer.add_rope_freq_base(1000000.0)
    file.writer.add_sliding_window(WINDOW)
    file.writer.add_array("gemma3.attention.sliding_window_pattern", [il % 2 == 0 for il in range(shape.n_layer)])
    _add_embeddings(file, shape)
    for il in range(shape.n_layer):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            file.norm(f"blk.{il}.{name}", shape.n_embd)
        _add_head_norms(file, shape, f"blk.{il}")
        _add_attention(file, shape, f"blk.{il}", SELF_ATTENTION)
        _add_ffn(file, shape, f"blk.{il}")


def _mamba(file: _File, shape: Shape) -> None:
    d, d_inner, d_state, d_conv = shape.n_embd, 2 * shape.n_embd, 8, 4
    dt_rank = d // 16
    file.writer.add_feed_forward_length(0)
    file.writer.add_head_count(0)
    file.writer.add_layer_norm_rms_eps(1e-5)
    file.writer.add_ssm_conv_kernel(d_conv)
    file.writer.add_ssm_inner_size(d_inner)
    file.writer.add_ssm_state_size(d_state)
    file.writer.add_ssm_time_step_rank(dt_rank)
    _add_embeddings(file, shape)
    f32 = GGMLQuantizationType.F32
    for il in range(shape.n_layer):
        file.norm(f"blk.{il}.attn_norm", d)
        file.dense(f"blk.{il}.ssm_in", 2 * d_inner, d)
        file.matrix(f"blk.{il}.ssm_conv1d", file.normal(d_inner, d_conv, std=0.5), f32)
        file.vector(f"blk.{il}.ssm_conv1d.bias", file.normal(d_inner, std=0.1))
        file.dense(f"blk.{il}.ssm_x", dt_rank + 2 * d_state, d_inner)
        file.matrix(f"blk.{il}.ssm_dt", file.normal(d_inner, dt_rank, std=0.3), f32)
        file.vector(f"blk.{il}.ssm_dt.bias", file.normal(d_inner, std=0.1) - 3)
        file.vector(f"blk.{il}.ssm_a", -file.spread(d_inner * d_state, 0.5).reshape(d_inner, d_state))
        file.vector(f"blk.{il}.ssm_d", np.ones(d_inner, np.float32))
        file.matrix(f"blk.{il}.ssm_out", _to_residual(file.normal(d, d_inner, std=d_inner**-0.5)))


def _hybrid_layers(shape: Shape) -> list[bool]:
    """Which layers of a hybrid model have attention: the first and every second after it."""
    return [il % 2 == 0 for il in range(shape.n_layer)]


def _lfm2(file: _File, shape: Shape) -> None:
    d, attention, d_conv = shape.n_embd, _hybrid_layers(shape), 3
    _add_attention_sizes(file, shape, attention)
    file.writer.add_layer_norm_rms_eps(1e-5)
    file.writer.add_rope_freq_base(1000000.0)
    # gguf 0.17.1 has no method for it.
    file.writer.add_uint32("lfm2.shortconv.l_cache", d_conv)
    # The name that llama.cpp has for the last norm of this architecture.
    _add_embeddings(file, shape, norm="token_embd_norm")
    for il in range(shape.n_layer):
        prefix = f"blk.{il}"
        file.norm(f"{prefix}.attn_norm", d)
        if attention[il]:
            _add_head_norms(file, shape, prefix)
            _add_attention(file, shape, prefix, SELF_ATTENTION)
        else:
            file.dense(f"{prefix}.shortconv.in_proj", 3 * d, d)
            conv = file.normal(d, d_conv, std=d_conv**-0.5)
            file.matrix(f"{prefix}.shortconv.conv", conv, GGMLQuantizationType.F32)
            file.matrix(f"{prefix}.shortconv.out_proj", _to_residual(file.normal(d, d, std=d**-0.5)))
        file.norm(f"{prefix}.ffn_norm", d)
        _add_ffn(file, shape, prefix)


def _deci(file: _File, shape: Shape) -> None:
    """Layers in turn: attention, a matrix in its place, attention, neither."""
    d = shape.n_embd
    heads = [(shape.n_head, shape.n_head, shape.n_head, 0)[il % 4] for il in range(shape.n_layer)]
    attention = [il % 2 == 0 for il in range(shape.n_layer)]
    file.writer.add_feed_forward_length(shape.n_ff)
    file.writer.add_head_count(heads)
    file.writer.add_head_count_kv([shape.n_head_kv * here for here in attention])
    file.writer.add_key_length(shape.head_dim)
    file.writer.add_value_length(shape.head_dim)
    file.writer.add_layer_norm_rms_eps(1e-5)
    file.writer.add_rope_dimension_count(shape.head_dim)
    file.writer.add_rope_freq_base(10000.0)
    _add_embeddings(file, shape)
    for il in range(shape.n_layer):
        prefix = f"blk.{il}"
        if heads[il]:
            file.norm(f"{prefix}.attn_norm", d)
        if attention[il]:
            _add_attention(file, shape, prefix, SELF_ATTENTION)
        elif heads[il]:
            file.matrix(f"{prefix}.attn_output", _to_residual(file.normal(d, d, std=d**-0.5)), file.wo_type)
        file.norm(f"{prefix}.ffn_norm", d)
        _add_ffn(file, shape, prefix)


def _granitehybrid(file: _File, shape: Shape) -> None:
    attention = _hybrid_layers(shape)
    _add_attention_sizes(file, shape, attention)
    file.writer.add_layer_norm_rms_eps(1e-5)
    file.writer.add_rope_dimension_count(shape.head_dim)
    file.writer.add_rope_freq_base(10000.0)
    _add_mamba2_sizes(file, shape)
    _add_embeddings(file, shape)
    for il in range(shape.n_layer):
        file.norm(f"blk.{il}.attn_norm", shape.n_embd)
        if attention[il]:
            _add_attention(file, shape, f"blk.{il}", SELF_ATTENTION)
        else:
            _add_mamba2(file, shape, f"blk.{il}")
        file.norm(f"blk.{il}.ffn_norm", shape.n_embd)
        _add_ffn(file, shape, f"blk.{il}")


# State and convolution of Mamba2; its heads are of 32 channels.
MAMBA2_STATE, MAMBA2_CONV, MAMBA2_HEAD = 16, 4, 32


def _add_mamba2_sizes(file: _File, shape: Shape) -> None:
    d_inner = 2 * shape.n_embd
    file.writer.add_ssm_conv_kernel(MAMBA2_CONV)
    file.writer.add_ssm_inner_size(d_inner)
    file.writer.add_ssm_state_size(MAMBA2_STATE)
    file.writer.add_ssm_time_step_rank(d_inner // MAMBA2_HEAD)
    # gguf 0.17.1 has no method for it.
    file.writer.add_uint32(f"{file.writer.arch}.ssm.group_count", 1)


def _add_mamba2(file: _File, shape: Shape, prefix: str) -> None:
    d, d_inner = shape.n_embd, 2 * shape.n_embd
    heads, d_conv = d_inner // MAMBA2_HEAD, d_inner + 2 * MAMBA2_STATE
    # Gate, what is convolved (input, B and C), and the time steps.
    file.dense(f"{prefix}.ssm_in", d_inner + d_conv + heads, d)
    conv = file.normal(d_conv, MAMBA2_CONV, std=MAMBA2_CONV**-0.5)
    file.matrix(f"{prefix}.ssm_conv1d", conv, GGMLQuantizationType.F32)
    file.vector(f"{prefix}.ssm_conv1d.bias", file.normal(d_conv, std=0.1))
    file.vector(f"{prefix}.ssm_dt.bias", file.normal(heads) - 3)
    file.vector(f"{prefix}.ssm_a", -file.spread(heads, 0.5).reshape(heads, 1))
    file.vector(f"{prefix}.ssm_d", np.ones((heads, 1), np.float32))
    file.vector(f"{prefix}.ssm_norm.weight", 1 + file.normal(1, d_inner, std=0.1))
    file.matrix(f"{prefix}.ssm_out", _to_residual(file.normal(d, d_inner, std=d_inner**-0.5)))


def _bloom(file: _File, shape: Shape) -> None:
    """Bloom has no grouped heads, and its heads fill the model width."""
    d = shape.n_embd
    file.writer.add_feed_forward_length(shape.n_ff)
    file.writer.add_head_count(shape.n_head)
    file.writer.add_layer_norm_eps(1e-5)
    _add_embeddings(file, shape, bias=True)
    file.norm("token_embd_norm", d, bias=True)
    for il in range(shape.n_layer):
        prefix = f"blk.{il}"
        for name in ("attn_norm", "ffn_norm"):
            file.norm(f"{prefix}.{name}", d, bias=True)
        file.dense(f"{prefix}.attn_qkv", 3 * d, d)
        file.matrix(f"{prefix}.attn_output", file.normal(d, d, std=d**-0.5), file.wo_type)
        _add_ffn(file, shape, prefix, gated=False)
        for name, n in (("attn_qkv", 3 * d), ("attn_output", d), ("ffn_up", shape.n_ff), ("ffn_down", d)):
            file.vector(f"{prefix}.{name}.bias", file.normal(n, std=0.1))


def _deepseek2(file: _File, shape: Shape) -> None:
    """Latent attention: the cache holds one row of kv_rank + rope numbers per token; dense feed-forward layers."""
    d, heads, nope, rope = shape.n_embd, shape.n_head, shape.head_dim, shape.head_dim // 2
    q_rank, kv_rank = 32, 64
    writer = file.writer
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(rope)
    writer.add_key_length(kv_rank + rope)
    writer.add_value_length(kv_rank)
    writer.add_key_length_mla(nope + rope)
    writer.add_value_length_mla(shape.head_dim)
    writer.add_q_lora_rank(q_rank)
    writer.add_kv_lora_rank(kv_rank)
    writer.add_leading_dense_block_count(shape.n_layer)
    # Read even if no layer has experts.
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_expert_shared_count(1)
    _add_embeddings(file, shape)
    for il in range(shape.n_layer):
        prefix = f"blk.{il}"
        for name, n in (("attn_norm", d), ("ffn_norm", d), ("attn_q_a_norm", q_rank), ("attn_kv_a_norm", kv_rank)):
            file.norm(f"{prefix}.{name}", n)
        file.dense(f"{prefix}.attn_q_a", q_rank, d)
        file.dense(f"{prefix}.attn_q_b", heads * (nope + rope), q_rank)
        file.dense(f"{prefix}.attn_kv_a_mqa", kv_rank + rope, d)
        file.matrix(f"{prefix}.attn_k_b", file.normal(heads, kv_rank, nope, std=kv_rank**-0.5))
        file.matrix(f"{prefix}.attn_v_b", file.normal(heads, shape.head_dim, kv_rank, std=kv_rank**-0.5))
        wo = file.normal(d, heads * shape.head_dim, std=(heads * shape.head_dim) ** -0.5)
        file.matrix(f"{prefix}.attn_output", _to_residual(wo), file.wo_type)
        _add_ffn(file, shape, prefix)


def _t5(file: _File, shape: Shape) -> None:
    """T5 has no grouped heads either: as many query heads as there are KV heads."""
    shape = replace(shape, n_head=shape.n_head_kv)
    buckets = 32
    _add_attention_sizes(file, shape)
    file.writer.add_layer_norm_rms_eps(1e-6)
    file.writer.add_relative_attn_buckets_count(buckets)
    file.writer.add_decoder_start_token_id(0)
    _add_embeddings(file, shape, norm="dec.output_norm")
    file.norm("enc.output_norm", shape.n_embd)
    for il in range(shape.n_layer):
        for side, attentions in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
            prefix = f"{side}.blk.{il}"
            for name in attentions:
                file.norm(f"{prefix}.{name}_norm", shape.n_embd)
                _add_attention(file, shape, prefix, (f"{name}_q", f"{name}_k", f"{name}_v", f"{name}_o"))
            if il == 0:
                file.matrix(f"{prefix}.attn_rel_b", file.normal(buckets, shape.n_head), GGMLQuantizationType.F32)
            file.norm(f"{prefix}.ffn_norm", shape.n_embd)
            _add_ffn(file, shape, prefix)


BUILDERS: dict[str, Callable[[_File, Shape], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "deci": _deci,
    "lfm2": _lfm2,
    "granitehybrid": _granitehybrid,
    "mamba": _mamba,
    "bloom": _bloom,
    "deepseek2": _deepseek2,
    "t5": _t5,
}


def main(arguments: list[str] | None = None) -> None:
    """Write the model that the command line describes."""
    parser = argparse.ArgumentParser(description="Write a tiny GGUF model with random weights.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--arch", choices=BUILDERS, default="llama")
    defaults = write_tiny.__kwdefaults__ or {}
    for name in ("seed", "n_layer", "n_head", "n_head_kv", "head_dim", "n_embd", "n_ff", "n_ctx"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=defaults[name])
    for name in ("wo_type", "weight_type"):
        parser.add_argument(f"--{name.replace('_', '-')}", default=defaults[name], help="F32, F16, Q8_0, ...")
    options = vars(parser.parse_args(arguments))
    print(write_tiny(options.pop("path"), **options))


if __name__ == "__main__":
    main()
