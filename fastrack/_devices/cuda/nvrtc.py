"""Find the CUDA sources of the kernels, with the constants to launch them, and load what was compiled of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

from fastrack._devices.cuda.commands import Function
from fastrack.errors import DeviceError

_KINDS = ("open", "seal", "gather", "widen", "small", "pick", "keep", "restore")
KERNELS = ("prepare", "unwrap", *(f"{name}_{bits}" for name in _KINDS for bits in (128, 256)))
"""The names of the kernels."""

CUBINS = ("sm_80", "sm_90", "sm_100", "sm_120")
"""The architectures that fastrack's build compiles the kernels for. GPUs of a later minor version run them too."""

PTX = "compute_100"
"""The PTX for other GPUs: those of 11.0, and those later than 12. No later target fits all of these."""

MAIN = "fastrack.cu"
"""The file with the kernels, which includes the others."""

_MAX_SHARED = 100  # percent of a multiprocessor's memory as shared memory; with less, one block fits instead of two
_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_CONSTANT = re.compile(r"^#define FASTRACK_(\w+) (\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The sources of the kernels, and their constants."""

    folder: Path
    code: str  # the text of the main file
    digest: str  # of all files
    constants: dict[str, int]  # values of ``#define FASTRACK_THREADS 512`` and the like

    @property
    def options(self) -> tuple[str, ...]:
        """Compiler options. They include the digest, since a cache may use only options and main file as its key."""
        return ("-std=c++17", f"-I{self.folder}", f"-DFASTRACK_SOURCES={self.digest}")

    def image(self, architecture: str) -> Path:
        """Return the file with these kernels compiled for an architecture, which exists if fastrack's build made it."""
        suffix = "ptx.xz" if architecture == PTX else "cubin.xz"  # five times as small
        return Path(str(files("fastrack")), "kernels", f"{architecture}-{self.digest}.{suffix}")

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self._constant("THREADS")

    def shared(self, kernel: str) -> int:
        """Return the shared memory per block of a kernel, in bytes."""
        kind = kernel.partition("_")[0]
        own = {"gather": "GATHER_", "pick": "PICK_", "small": "SMALL_", "seal": "SMALL_", "unwrap": "SMALL_"}
        return self._constant(f"{own.get(kind, '')}SHARED_BYTES")

    def _constant(self, name: str) -> int:
        if name not in self.constants:
            raise DeviceError(f"the kernels in {self.folder} do not define FASTRACK_{name}; install fastrack again")
        return self.constants[name]


def find_kernels() -> Kernels:
    """Return the sources of this installation, from the package or from the checkout that contains it.

    Raise DeviceError if there are no sources.
    """
    package = Path(str(files("fastrack")))
    checkout = package.parent
    # Without the project file this is no checkout: `kernels` may be another package in site-packages.
    folders = [package / "kernels"]
    if (checkout / "pyproject.toml").is_file():
        folders.append(checkout / "kernels")
    for folder in folders:
        if (folder / MAIN).is_file():
            return read_kernels(folder)
    raise DeviceError(f"fastrack's kernels are in neither {package} nor beside it; install fastrack again")


def read_kernels(folder: Path) -> Kernels:
    """Read the sources in a folder."""
    digest = sha256()
    for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")]):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\n".encode() + text)
    code = (folder / MAIN).read_text(encoding="utf-8")
    constants = {name: int(value) for name, value in _CONSTANT.findall(code)}
    return Kernels(folder, code, digest.hexdigest()[:32], constants)


def load_kernels(
    cupy: Any, sources: Kernels, capability: tuple[int, int]
) -> tuple[tuple[Any, dict[str, Function]] | None, str]:
    """Load the kernels that were compiled when fastrack was built, for this compute capability or else as PTX.

    Return the module and each kernel by its name, or None if nothing fits the device and its driver; and who compiled
    them, or why nothing fits.
    """
    major, minor = capability
    fitting = (each for each in CUBINS if each[3:-1] == str(major) and int(each[-1]) <= minor)
    cubin = next(fitting, f"sm_{major}{minor}")
    makers = {cubin: f"fastrack's build, for {cubin}", PTX: f"the driver, from fastrack's PTX for {PTX}"}
    reasons: list[str] = []
    for architecture, maker in makers.items():
        path = sources.image(architecture)
        if not path.is_file():
            reasons.append(f"fastrack brings no {architecture}")
            continue
        try:
            with NamedTemporaryFile(suffix=path.suffixes[-2]) as file:
                _unpack(path, file)
                loaded = _functions(cupy.RawModule(path=file.name), sources)
        except (ImportError, OSError) as error:  # lzma is no part of some builds of Python
            reasons.append(f"{architecture} cannot be read ({error})")
        except cupy.cuda.driver.CUDADriverError as error:
            if error.status == _NO_MEMORY:
                raise
            reasons.append(f"{architecture} was refused ({error})")
        else:
            return loaded, "; ".join([maker, *reasons])
    return None, "; ".join(reasons)


def _unpack(path: Path, target: IO[bytes]) -> None:
    from lzma import LZMAError, decompress

    try:
        target.write(decompress(path.read_bytes()))
    except LZMAError as error:
        raise OSError(str(error)) from error
    target.flush()


def compile_kernels(cupy: Any, sources: Kernels) -> tuple[Any, dict[str, Function]]:
    """Compile the kernels by NVRTC; CuPy caches them on disk. Return the module, and each kernel by its name."""
    return _functions(cupy.RawModule(code=sources.code, options=sources.options, backend="nvrtc"), sources)


def _functions(module: Any, sources: Kernels) -> tuple[Any, dict[str, Function]]:
    functions = {}
    for name in KERNELS:
        kernel = module.get_function(name)
        kernel.max_dynamic_shared_size_bytes = shared = sources.shared(name)
        kernel.preferred_shared_memory_carveout = _MAX_SHARED
        functions[name] = Function(int(kernel.kernel.ptr), sources.threads, shared, kernel.local_size_bytes)
    return module, functions
