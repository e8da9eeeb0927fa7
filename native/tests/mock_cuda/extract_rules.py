"""Take the rules by which ggml's CUDA backend accepts an op, and replays a graph, out of its source.

CMake runs this while the tests are built: ``extract_rules.py LLAMA_CPP OUT`` copies the functions and macros listed
in PIECES, as they stand in the unpacked (and patched) llama.cpp, to one file that an ordinary C++ compiler can read
after cuda-stand-ins.h. When a piece is missing, or the rules come to need another one, the build fails.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

CUDA = Path("ggml/src/ggml-cuda")
CONSTEXPR = "static constexpr __host__ __device__"


class ExtractError(Exception):
    """A piece is not where it was, or not what it was; the text says which."""


# Comments, strings and characters: braces in them do not count.
SILENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def block(text: str, start: str) -> str:
    """From the line that begins with `start` to the end of its outermost braces (and a semicolon after them)."""
    places = [match.start() for match in re.finditer("^" + re.escape(start), text, re.MULTILINE)]
    # a declaration ends before it has a brace
    bodies = [at for at in places if "{" in text[at:] and ";" not in text[at : text.index("{", at)]]
    if len(bodies) != 1:
        raise ExtractError(f"{len(bodies)} definitions begin with {start!r}, expected one")
    at = bodies[0]
    bare = SILENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text[at:])
    depth = 0
    for match in re.finditer("[{}]", bare):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            end = at + match.end()
            if text[end - 2] != "\n":
                raise ExtractError(f"the body of {start!r} does not end at the beginning of a line")
            return text[at : end + 1] if text[end : end + 1] == ";" else text[at:end]
    raise ExtractError(f"the braces of {start!r} are not closed")


def conditional(text: str, start: str) -> str:
    """The #if ... #endif around the one line "#define NAME" that `start` names."""
    found = re.findall(rf"^#if[^\n]*\n#\s*{re.escape(start)}\n#endif[^\n]*$", text, re.MULTILINE)
    if len(found) != 1:
        raise ExtractError(f"{len(found)} conditional lines {start!r}, expected one")
    return str(found[0])


def defines(text: str, start: str) -> str:
    """All one-line macros whose names begin as `start` does."""
    found = re.findall(rf"^{re.escape(start)}[^\n]*[^\n\\]$", text, re.MULTILINE)
    if not found:
        raise ExtractError(f"no line begins with {start!r}")
    return "\n".join(found)


# In the order in which they use one another.
PIECES: list[tuple[str, Callable[[str, str], str], str]] = [
    ("common.cuh", defines, "#define GGML_CUDA_CC_"),
    ("common.cuh", conditional, "define GGML_CUDA_USE_CUB"),
    ("common.cuh", conditional, "define FLASH_ATTN_AVAILABLE"),
    ("common.cuh", block, "static int ggml_cuda_highest_compiled_arch("),
    ("common.cuh", block, "static bool amd_mfma_available("),
    ("common.cuh", block, "static bool amd_wmma_available("),
    ("common.cuh", block, "static bool volta_mma_available("),
    ("common.cuh", block, "static bool turing_mma_available("),
    ("fwht.cu", block, "bool ggml_cuda_op_mul_mat_use_fwht("),
    ("lightning-indexer.cu", block, "bool ggml_cuda_lightning_indexer_supported("),
    ("fattn-common.cuh", defines, "#define FATTN_KQ_STRIDE "),
    ("fattn-mma-f16.cuh", block, f"{CONSTEXPR} bool ggml_cuda_flash_attn_ext_mma_f16_may_use_sparse("),
    ("fattn.cu", block, "bool ggml_cuda_flash_attn_ext_mma_f16_shall_use_sparse("),
    ("fattn.cu", block, "enum best_fattn_kernel "),
    ("fattn.cu", block, "static bool ggml_cuda_fattn_kv_type_supported("),
    ("fattn.cu", block, "static best_fattn_kernel ggml_cuda_get_best_fattn_kernel("),
    ("fattn.cu", block, "bool ggml_cuda_flash_attn_ext_supported("),
    ("ggml-cuda.cu", block, "static bool ggml_backend_cuda_device_supports_op("),
    ("ggml-cuda.cu", block, "static bool ggml_backend_cuda_device_supports_buft("),
    ("ggml-cuda.cu", block, "static int64_t get_op_batch_size("),
    ("ggml-cuda.cu", block, "static bool ggml_backend_cuda_device_offload_op("),
    ("ggml-cuda.cu", block, "static const void * ggml_cuda_graph_get_key("),
    ("ggml-cuda.cu", block, "static bool ggml_cuda_graph_update_required("),
]  # fmt: skip


def extract(llama: Path) -> str:
    """All pieces, each under the name of the file that it is from."""
    parts = []
    for name, how, start in PIECES:
        try:
            text = (llama / CUDA / name).read_text(encoding="utf-8")
            parts.append(f"// ---- {name}\n\n{how(text, start)}\n")
        except (OSError, ExtractError) as e:
            raise ExtractError(f"{CUDA / name}: {e}") from e
    return "\n".join(parts)


def main() -> int:
    """Write the file."""
    llama, out = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        out.write_text(extract(llama), encoding="utf-8")
    except ExtractError as e:
        print(f"The rules of the CUDA backend could not be extracted: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
