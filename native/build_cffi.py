"""Write the C source of the extension module ``pycriticalkv._native``.

The declarations come from ``include/criticalkv.h`` itself, so there is no second list to keep in step, and the C
compiler checks the result against that very header.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import cffi
from cffi import recompiler

MODULE = "pycriticalkv._native"
# what store.py implements
CALLBACKS = 'extern "Python" bool pycriticalkv_progress(int32_t, int32_t, void *);'

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
ONLY_CPLUSPLUS = re.compile(
    r"^[ \t]*#[ \t]*if(?:def[ \t]+|[ \t]+defined[ \t]*\(?[ \t]*)__cplusplus\b.*?^[ \t]*#[ \t]*endif[^\n]*$",
    re.DOTALL | re.MULTILINE,
)
INTEGER_CONSTANT = re.compile(r"^[ \t]*#[ \t]*define[ \t]+\w+[ \t]+\(?-?(?:0[xX][0-9a-fA-F]+|\d+)\)?[ \t]*$")
DIRECTIVE = re.compile(r"^[ \t]*#")
EXPORT_MACRO = re.compile(r"\bCRITICALKV_API\b")


def keep_line(line: str) -> bool:
    """Drop preprocessor lines, except integer constants, which cffi understands."""
    return not DIRECTIVE.match(line) or bool(INTEGER_CONSTANT.match(line))


def declarations(header: str) -> str:
    """Return the part of a plain C header that cffi's parser takes."""
    text = COMMENT.sub(" ", header.replace("\\\n", " "))
    text = ONLY_CPLUSPLUS.sub("", text)
    lines = [line for line in text.splitlines() if keep_line(line)]
    lines = [re.sub(r"\((-?\w+)\)\s*$", r"\1", line) if DIRECTIVE.match(line) else line for line in lines]
    return EXPORT_MACRO.sub("", "\n".join(lines))


def generate(header: Path, target: Path) -> None:
    """Write the C source of the module; cffi leaves the file alone when nothing changed."""
    ffi = cffi.FFI()
    ffi.cdef(declarations(header.read_text(encoding="utf-8")))
    ffi.cdef(CALLBACKS)
    recompiler.make_c_source(ffi, MODULE, f'#include "{header.name}"\n', str(target))


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description="Write the C source of the cffi extension module.")
    parser.add_argument("header", type=Path, help="the C API's header")
    parser.add_argument("target", type=Path, help="the C file to write")
    arguments = parser.parse_args()
    generate(arguments.header, arguments.target)


if __name__ == "__main__":
    main()
