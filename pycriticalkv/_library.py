"""Makes ``llama_cpp`` load the libraries of this package."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

LIBRARY_FOLDER = Path(__file__).resolve().parent / "lib"
LLAMA_CPP_PYTHON = (
    "0.3.36"  # the version whose llama.cpp is inside; native/llama.cpp.lock and pyproject.toml name it too
)
ENVIRONMENT = "LLAMA_CPP_LIB_PATH"  # read by llama_cpp when it is imported


def bind() -> None:
    """Import ``llama_cpp`` with the libraries of this package.

    Raises:
        ImportError: This is not an installation, ``llama_cpp`` was imported before with other libraries, the
            environment names other libraries, or llama-cpp-python has another version.
    """
    if not LIBRARY_FOLDER.is_dir():
        raise ImportError(
            f"{LIBRARY_FOLDER} is missing: this is the source folder of pycriticalkv, not an installation. Install it "
            "(see the README) and run Python from another folder."
        )
    _check_version()
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is not None:
        _check_folder(Path(str(getattr(loaded, "_base_path", ""))), "llama_cpp was imported before pycriticalkv and")
        return
    before = os.environ.get(ENVIRONMENT)
    if before:
        _check_folder(Path(before), f"the environment variable {ENVIRONMENT}")
    os.environ[ENVIRONMENT] = str(LIBRARY_FOLDER)
    try:
        import llama_cpp  # noqa: F401, PLC0415
    finally:
        # other programs that this process starts keep their own llama.cpp
        if before is None:
            del os.environ[ENVIRONMENT]
        else:
            os.environ[ENVIRONMENT] = before


def _check_version() -> None:
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        version = "missing"
    if version != LLAMA_CPP_PYTHON:
        raise ImportError(
            f"pycriticalkv needs llama-cpp-python {LLAMA_CPP_PYTHON}, but it is {version}. Install it with: "
            f'CMAKE_ARGS="-DLLAMA_BUILD=OFF" pip install --no-cache-dir llama-cpp-python=={LLAMA_CPP_PYTHON}'
        )


def _check_folder(folder: Path, who: str) -> None:
    if folder.resolve() != LIBRARY_FOLDER:
        raise ImportError(
            f"{who} uses the libraries in {folder}, which cannot evict. Import pycriticalkv first (before llama_cpp "
            f"and whatever imports it), without {ENVIRONMENT} set."
        )
