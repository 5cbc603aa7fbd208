"""The CUDA kernels on the host, in a process under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cases import each
from helpers.kernel_host import COMPILER, SHIM, SOURCE

TESTS = Path(__file__).parents[1]
RUNTIMES = ("libasan.so", "libubsan.so")
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


@pytest.fixture(scope="module")
def preload():
    """The sanitizers' libraries, which must come before all others in a Python that was built without them."""
    paths = []
    for name in RUNTIMES:
        command = [COMPILER, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"this g++ comes without {name}")
        paths.append(path)
    return " ".join(paths)


def run(preload, library, *arguments):
    command = [sys.executable, "-m", "helpers.kernel_cases", str(library), *map(str, arguments)]
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": preload}
    return subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_the_kernels_stay_within_their_memory_and_within_the_language(build, preload):
    done = run(preload, build(SOURCE, "sanitized"))
    assert (done.returncode, done.stdout) == (0, "all is right\n"), done.stderr[-8000:]


@pytest.mark.slow
@each(
    ("kernel", "offset", "complaint"),
    [
        ("touch_shared", 99, None),
        ("touch_shared", 100, "use-after-poison"),
        ("touch", 39, None),
        ("touch", 40, "use-after-poison"),
        ("touch", -1, "use-after-poison"),
        ("load_sixteen", 16, None),
        ("load_sixteen", 32, "use-after-poison"),
        ("load_sixteen", 8, "misaligned address"),
    ],
)
def test_the_sanitizers_see_what_is_wrong(build, preload, kernel, offset, complaint):
    done = run(preload, build(SHIM / "selftest.cu", "sanitized"), kernel, offset % 2**64)
    assert (done.returncode == 0) is (complaint is None), done.stderr[-8000:]
    assert (complaint or "") in done.stderr
