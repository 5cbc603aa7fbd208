"""The CUDA sources of the kernels: where they are, and what must be known of them to start one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from fastrack.errors import DeviceError

KERNELS = tuple(f"{name}_{bits}" for name in ("open", "seal", "gather") for bits in (128, 256))
"""The kernels' names."""

_MAIN = "fastrack.cu"
_CONSTANT = re.compile(r"^#define FASTRACK_(\w+) (\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The sources.

    folder : where they lie
    code : the main one
    digest : of all of them
    constants : what they say about themselves, as in ``#define FASTRACK_THREADS 512``
    """

    folder: Path
    code: str
    digest: str
    constants: dict[str, int]

    @property
    def options(self) -> tuple[str, ...]:
        """What the compiler is told. With the digest, since a cache may look at the main source and at this only."""
        return ("-std=c++17", f"-I{self.folder}", f"-DFASTRACK_SOURCES={self.digest}")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self._constant("THREADS")

    @property
    def state(self) -> int:
        """Bytes of the state of a key; `fastrack._devices.cuda.key_state` writes it."""
        return self._constant("STATE_BYTES")

    def shared(self, kernel: str) -> int:
        """Bytes of shared memory that a block of this kernel takes."""
        return self._constant("GATHER_SHARED_BYTES" if kernel.startswith("gather") else "SHARED_BYTES")

    def _constant(self, name: str) -> int:
        if name not in self.constants:
            raise DeviceError(f"the kernels in {self.folder} do not say FASTRACK_{name}; install fastrack again")
        return self.constants[name]


def find_kernels() -> Kernels:
    """The sources of this installation: those in the package, or those of the checkout that it runs from.

    Raises
    ------
    DeviceError
        If there are none.
    """
    package = Path(str(files("fastrack")))
    checkout = package.parent
    # Only a checkout has the project file: another package may be installed as `kernels` in site-packages.
    folders = [package / "kernels"]
    if (checkout / "pyproject.toml").is_file():
        folders.append(checkout / "kernels")
    for folder in folders:
        if (folder / _MAIN).is_file():
            return read_kernels(folder)
    raise DeviceError(f"fastrack's kernels are in neither {package} nor beside it; install fastrack again")


def read_kernels(folder: Path) -> Kernels:
    """The sources in a folder."""
    digest = sha256()
    for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")]):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\n".encode() + text)
    code = (folder / _MAIN).read_text(encoding="utf-8")
    constants = {name: int(value) for name, value in _CONSTANT.findall(code)}
    return Kernels(folder, code, digest.hexdigest()[:32], constants)
