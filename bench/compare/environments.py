"""A revision and the working tree, each installed into an environment of its own that is kept by its contents.

Dependencies are not installed again: a ``.pth`` file adds the environment that runs the comparison. fastrack itself is
built and installed, not linked, with its kernels; compiled code is kept in its environment.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from bench.compare import CannotCompareError

ROOT = Path(__file__).resolve().parents[2]
_KEPT = 12  # environments
_BUILT = ("fastrack", "kernels", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "LICENSE-numba")
_FINISHED = "finished"


def cache_of(root: Path) -> Path:
    return root / ".benchmarks" / "compare"


def take_revision(root: Path, revision: str, folder: Path) -> str:
    """Put a revision's files into `folder`, and return its short id."""
    try:
        commit = _git(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    except CannotCompareError as error:
        raise CannotCompareError(
            f"there is no revision {revision!r} here; name a branch, a tag or a commit of `git log`, "
            "and fetch it first if it is somewhere else"
        ) from error
    with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", "--format=tar", commit))) as archive:
        archive.extractall(folder, filter="data")
    return commit[:12]


def take_working_tree(root: Path, folder: Path) -> str:
    """Put the working tree's files into `folder`, changed and new ones too, and return its label."""
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z").decode().split("\0")
    for name in filter(None, listed):
        source, target = root / name, folder / name
        if source.is_file():  # it may be deleted without a commit
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    changed = _git(root, "status", "--porcelain", "--", *_BUILT)
    return "the working tree" + (" with changes" if changed.strip() else ", as committed")


def build(side: str, source: Path, cache: Path, say) -> Path:
    """Install the tree in `source`, or find it installed, and return the environment's Python.

    Each side has its own environment, with paths of equal length, even for equal contents: a comparison of a tree with
    itself runs like any other.
    """
    environment = cache / f"{side}-{_digest(source)}"
    python = environment / "bin" / "python"
    if not (environment / _FINISHED).exists():
        say(f"building {environment.name}")
        shutil.rmtree(environment, ignore_errors=True)
        try:
            _install(source, environment, python)
        except BaseException:
            shutil.rmtree(environment, ignore_errors=True)
            raise
    (environment / _FINISHED).touch()
    return python


def forget_old(cache: Path) -> None:
    """Remove all but the most recently used environments."""
    places = sorted((mark.stat().st_mtime, mark.parent) for mark in cache.glob(f"*/{_FINISHED}"))
    for _, environment in places[:-_KEPT]:
        shutil.rmtree(environment, ignore_errors=True)


def check_requirements(base: Path, head: Path) -> list[str]:
    """Return notes on dependencies, which both sides share; raise if a side needs others."""
    needed, present = _requirements(base), _requirements(head)
    for name, requirements in (("base", needed), ("working tree", present)):
        missing = [text for text in sorted(requirements) if not _is_met(Requirement(text))]
        if missing:
            raise CannotCompareError(
                f"the {name} needs {', '.join(missing)}, and this environment has another version or none; "
                "install what both sides accept, or compare with a later base"
            )
    differing = ", ".join(sorted(needed ^ present))
    return [f"dependencies differ ({differing}); both sides ran with those installed here"] if differing else []


def _requirements(folder: Path) -> set[str]:
    return set(tomllib.loads((folder / "pyproject.toml").read_text())["project"].get("dependencies", []))


def _is_met(requirement: Requirement) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def _install(source: Path, place: Path, python: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", place)
    site = next((place / "lib").glob("python*/site-packages"))
    outer = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "outer.pth").write_text("".join(f"{path}\n" for path in outer))
    _run(
        sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet",
        "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", source,
    )  # fmt: skip


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise CannotCompareError(f"this could not be installed:\n{' '.join(map(str, command))}\n{tail}")


def _digest(source: Path) -> str:
    digest = hashlib.sha256(f"{sys.executable} {sys.version}".encode())
    for name in _BUILT:
        top = source / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file():
                digest.update(f"{path.relative_to(source)} {path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _git(root: Path, *arguments: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", root, *arguments], capture_output=True, check=True).stdout
    except FileNotFoundError as error:
        raise CannotCompareError("git is not installed, and revisions come from it") from error
    except subprocess.CalledProcessError as error:
        raise CannotCompareError(f"git {arguments[0]} failed: {error.stderr.decode().strip()}") from error
