"""A GGUF file with random weights in the shape of Llama 3 8B, for speed where no model can be fetched.

Every matrix is Q4_0 and made of the same few random blocks; nothing sensible comes out, but as many bytes are read and
as much is computed as with a true model. The vocabulary is the tiny test model's, filled up.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import tiny

Q4_0_NUMBERS, Q4_0_BYTES = 32, 18  # a block: one f16 scale, 32 numbers of four bits


@dataclass(frozen=True)
class Sizes:
    """Sizes of a llama; the defaults are those of Llama 3 8B but for the vocabulary."""

    n_layer: int = 32
    n_embd: int = 4096
    n_ff: int = 14336
    n_head: int = 32
    n_head_kv: int = 8
    n_vocab: int = 32000
    n_ctx: int = 131072


def random_matrix(random: np.random.Generator, n_out: int, n_in: int) -> NDArray[np.uint8]:
    """Bytes of a Q4_0 matrix [n_out, n_in] whose outputs have about the size of its inputs."""
    blocks = n_out * n_in // Q4_0_NUMBERS
    few = random.integers(0, 256, (min(blocks, 1 << 16), Q4_0_BYTES), dtype=np.uint8)
    # numbers are (0..15 - 8) * scale, of standard deviation 4.6 * scale
    few[:, :2] = np.frombuffer(np.float16(1 / (4.6 * n_in**0.5)).tobytes(), np.uint8)
    return np.resize(few, (blocks, Q4_0_BYTES)).reshape(n_out, -1)


def write_random_model(path: Path, sizes: Sizes, seed: int = 0) -> Path:
    """Write the model, 4.1 GB with the default sizes."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    head = sizes.n_embd // sizes.n_head
    writer.add_name("random weights in the shape of an 8B llama")
    writer.add_block_count(sizes.n_layer)
    writer.add_context_length(sizes.n_ctx)
    writer.add_embedding_length(sizes.n_embd)
    writer.add_feed_forward_length(sizes.n_ff)
    writer.add_head_count(sizes.n_head)
    writer.add_head_count_kv(sizes.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(head)
    tiny.add_vocabulary(writer, None, sizes.n_vocab - tiny.N_VOCAB)

    def matrix(name: str, n_out: int, n_in: int) -> None:
        writer.add_tensor(f"{name}.weight", random_matrix(random, n_out, n_in), raw_dtype=GGMLQuantizationType.Q4_0)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(sizes.n_embd, np.float32))

    matrix("token_embd", sizes.n_vocab, sizes.n_embd)
    for il in range(sizes.n_layer):
        norm(f"blk.{il}.attn_norm")
        matrix(f"blk.{il}.attn_q", sizes.n_embd, sizes.n_embd)
        matrix(f"blk.{il}.attn_k", sizes.n_head_kv * head, sizes.n_embd)
        matrix(f"blk.{il}.attn_v", sizes.n_head_kv * head, sizes.n_embd)
        matrix(f"blk.{il}.attn_output", sizes.n_embd, sizes.n_embd)
        norm(f"blk.{il}.ffn_norm")
        matrix(f"blk.{il}.ffn_gate", sizes.n_ff, sizes.n_embd)
        matrix(f"blk.{il}.ffn_up", sizes.n_ff, sizes.n_embd)
        matrix(f"blk.{il}.ffn_down", sizes.n_embd, sizes.n_ff)
    norm("output_norm")
    matrix("output", sizes.n_vocab, sizes.n_embd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
