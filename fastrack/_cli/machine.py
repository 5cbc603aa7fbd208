"""Observations on this machine: software, CPU, memory and signs of a CPU TEE. Nothing here is attested."""

import platform
import re
import resource
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fastrack._util.cpus import read_system, usable_cpus
from fastrack._version import __version__

ROOT = Path("/")
PACKAGES = ("numpy", "cryptography", "safetensors", "numba", "torch", "cupy")
FEATURES = ("aes", "pclmulqdq", "vaes", "vpclmulqdq", "avx2", "avx512f")
ARM_FEATURES = ("asimd", "aes", "pmull")

# Signs of a guest of a CPU TEE that no kind of evidence names.
_TEE_PATHS = {"sys/devices/platform/arm-cca-dev": "Arm CCA", "sys/kernel/config/tsm/report": "a confidential VM"}
_TEE_FLAGS = {"sev_es": "AMD SEV-ES", "sev": "AMD SEV"}


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU. `features` is empty if the system does not list them; `threads` is how many can run at a time."""

    model: str
    architecture: str
    features: dict[str, bool]
    threads: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Sizes of memory in bytes, and the setting of transparent huge pages; None if the system does not report them."""

    total: int | None
    available: int | None
    page: int
    huge_pages: str | None


@dataclass(frozen=True, slots=True)
class CpuTee:
    """Signs of a CPU TEE: its kind, and the places where they were seen."""

    kind: str | None
    seen: tuple[str, ...]


def read_software() -> dict[str, str | None]:
    """Return versions of Python and of packages, None for those that are not installed. Imports none of them."""
    return {"python": platform.python_version(), "fastrack": __version__, **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    names = (package, "cupy-cuda12x", "cupy-cuda13x") if package == "cupy" else (package,)
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def read_cpu(root: Path = ROOT) -> Cpu:
    """Return the CPU, as the kernel lists it."""
    text = read_system(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = _flags(text)
    features = ARM_FEATURES if "asimd" in flags else FEATURES
    return Cpu(
        model=model[1].strip() if model else platform.processor() or "unknown",
        architecture=platform.machine(),
        features={name: name in flags for name in features} if flags else {},
        threads=usable_cpus(root),
    )


def read_memory(root: Path = ROOT) -> Memory:
    """Return the memory, as the kernel lists it."""
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", read_system(root / "proc/meminfo"), re.MULTILINE))
    setting = re.search(r"\[(\w+)\]", read_system(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return Memory(
        total=int(sizes["MemTotal"]) << 10 if "MemTotal" in sizes else None,
        available=int(sizes["MemAvailable"]) << 10 if "MemAvailable" in sizes else None,
        page=resource.getpagesize(),
        huge_pages=setting[1] if setting else None,
    )


def read_caches(root: Path = ROOT) -> list[int] | None:
    """Return the bytes of the first CPU's caches of data, ascending, as the kernel lists them; None if it does not."""
    folder, sizes = root / "sys/devices/system/cpu/cpu0/cache", set[int]()
    for index in folder.glob("index*"):
        match = re.fullmatch(r"(\d{1,12})K", read_system(index / "size").strip())
        if match and read_system(index / "type").strip() in {"Data", "Unified"}:
            sizes.add(int(match[1]) << 10)
    return sorted(sizes - {0}) or None


def read_tee(root: Path = ROOT) -> CpuTee:
    """Return signs that this machine is a guest of a CPU TEE. Its operator can fake or hide each of them."""
    from fastrack.attest._kinds import CPU_KINDS

    kinds = CPU_KINDS.values()
    names = {name: kind.platform for kind in kinds for name in (kind.provider, kind.provider.replace("_", "-"))}
    paths = {f"dev/{name}": platform for name, platform in names.items()} | _TEE_PATHS
    seen = {f"/{path}": kind for path, kind in paths.items() if (root / path).exists()}
    flags = _flags(read_system(root / "proc/cpuinfo"))
    if "hypervisor" in flags:  # hosts that can run such guests have some of the same flags
        known = {kind.flag: kind.platform for kind in kinds} | _TEE_FLAGS
        seen |= {f"CPU flag {flag}": kind for flag, kind in known.items() if flag in flags}
    return CpuTee(next(iter(seen.values()), None), tuple(seen))


def _flags(cpuinfo: str) -> frozenset[str]:
    line = re.search(r"^(?:flags|Features)\s*: (.+)$", cpuinfo, re.MULTILINE)
    return frozenset(line[1].split()) if line else frozenset()
