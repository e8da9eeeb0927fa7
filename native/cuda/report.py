"""Compiles the fused CUDA kernels for several architectures and reports what each of them needs.

Registers, spilled bytes and shared memory are what ptxas says (-Xptxas -v). Prints one table in Markdown, a row per
kernel and a column per architecture: registers, and the static shared memory once. Ends with status 1 if a kernel
spills registers or keeps anything on the stack, and with 77 if there is no nvcc. With --ggml, what ggml's CUDA backend
calls (criticalkv-dispatch.cu) is compiled as well, against a patched llama.cpp that is unpacked to that folder.

    python native/cuda/report.py [--arch 86 90] [--nvcc PATH] [--jobs N] [--ggml FOLDER]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER / "criticalkv-kernels.cu"
DISPATCH = FOLDER / "criticalkv-dispatch.cu"
ARCHITECTURES = ["80", "86", "89", "90", "120"]
SKIPPED = 77

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
UNITS = {"5uint4": 16, "5uint2": 8, "j": 4, "t": 2}  # of move_rows, as they are mangled
TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0"]  # in the order of criticalkv::row_type


@dataclass
class Usage:
    """What one kernel needs on one architecture."""

    registers: int
    shared: int  # static, in bytes
    stack: int  # frame and spills, in bytes


def find_nvcc(given: str | None) -> str | None:
    """Path of nvcc: the given one, $CUDACXX, on the PATH, or where the toolkit installs itself."""
    candidates = [given] if given else [os.environ.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def readable(symbol: str) -> str:
    """The kernel's name with its cache type, head size or unit, from a mangled name."""
    name = re.match(r"_ZN10criticalkv(?:L)?(\d+)(\w+)", symbol)
    text = name.group(2)[: int(name.group(1))] if name else symbol
    if found := re.search(r"row_typeE(\d)E", symbol):
        text += f" {TYPES[int(found.group(1))]}"
    if found := re.search(r"Li(\d+)E", symbol):
        text += f" d={found.group(1)}"
    if found := re.search(r"move_rowsI(5uint4|5uint2|j|t)", symbol):
        text += f" {UNITS[found.group(1)]} bytes"
    return text


def parse(log: str) -> dict[str, Usage]:
    """Usage of every kernel in the output of ptxas -v."""
    usages: dict[str, Usage] = {}
    kernel, stack = "", 0
    for line in log.splitlines():
        if found := ENTRY.search(line):
            kernel = readable(found.group(1))
        elif found := STACK.search(line):
            stack = sum(int(n) for n in found.groups())
        elif (found := USED.search(line)) and kernel:
            shared = SHARED.search(line)
            if kernel in usages:
                raise ValueError(f"two kernels are called {kernel}")
            usages[kernel] = Usage(int(found.group(1)), int(shared.group(1)) if shared else 0, stack)
            kernel = ""
    return usages


def run(nvcc: str, architecture: str, *arguments: str) -> str:
    """What nvcc says while it compiles a file for nothing but that; raises RuntimeError with its words if it fails."""
    command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{architecture}", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "-o", f"{folder}/out"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def compile_dispatch(nvcc: str, architecture: str, folder: Path) -> None:
    """Compiles what ggml-cuda calls, with the patched ggml-cuda's own header."""
    subprocess.run([sys.executable, str(FOLDER.parent / "prepare_llama.py"), str(folder)], check=True)
    started = time.monotonic()
    ggml = folder / "llama.cpp" / "ggml"
    includes = [ggml / "include", ggml / "src", ggml / "src" / "ggml-cuda", FOLDER.parent / "tests" / "cublas"]
    flags = ["-extended-lambda", "-use_fast_math", "-c", *(f"-I{path}" for path in includes)]
    run(nvcc, architecture, *flags, str(DISPATCH))
    print(f"{DISPATCH.name}: compiled for sm_{architecture}, {time.monotonic() - started:.0f} s")


def compile_for(nvcc: str, architecture: str) -> dict[str, Usage]:
    """Compiles the kernels for one architecture; raises RuntimeError with the compiler's words."""
    started = time.monotonic()
    usages = parse(run(nvcc, architecture, "-cubin", "-Xptxas", "-v", str(SOURCE)))
    print(f"sm_{architecture}: {len(usages)} kernels, {time.monotonic() - started:.0f} s", file=sys.stderr)
    return usages


def table(reports: dict[str, dict[str, Usage]]) -> str:
    """Markdown: registers per architecture, the most shared memory of all of them, and what is spilled."""
    lines = ["| kernel | " + " | ".join(f"sm_{a}" for a in reports) + " | shared memory, bytes | stack and spills |"]
    lines.append("| --- |" + " --- |" * (len(reports) + 2))
    for kernel in sorted({kernel for usages in reports.values() for kernel in usages}):
        of_kernel = [usages[kernel] for usages in reports.values()]
        registers = " | ".join(str(usage.registers) for usage in of_kernel)
        shared, stack = max(u.shared for u in of_kernel), max(u.stack for u in of_kernel)
        lines.append(f"| {kernel} | {registers} | {shared:,} | {stack} |")
    return "\n".join(lines)


def main() -> int:
    """Compiles, prints the table, says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help="compute capabilities without the point")
    parser.add_argument("--nvcc", help="path of nvcc")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--ggml", type=Path, metavar="FOLDER", help="compile criticalkv-dispatch.cu too")
    args = parser.parse_args()
    nvcc = find_nvcc(args.nvcc)
    if nvcc is None:
        print("skipped: no nvcc (CUDACXX, PATH and /usr/local/cuda were searched)")
        return SKIPPED
    with ThreadPoolExecutor(args.jobs) as pool:
        reports = dict(zip(args.arch, pool.map(lambda a: compile_for(nvcc, a), args.arch), strict=True))
    print(table(reports))
    bad = [f"{k} on sm_{a}" for a, usages in reports.items() for k, usage in usages.items() if usage.stack]
    if bad or not all(reports.values()):
        print("kernels with spills or a stack frame: " + (", ".join(bad) or "none, but no kernels were found"))
        return 1
    print(f"no spills, no stack frames: {len(next(iter(reports.values())))} kernels, {len(reports)} architectures")
    if args.ggml is not None:
        compile_dispatch(nvcc, args.arch[0], args.ggml)
    return 0


if __name__ == "__main__":
    sys.exit(main())
