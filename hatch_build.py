"""Build wheels with fastrack's machine code for CPUs and GPUs, by a hook of hatchling, which pyproject.toml names."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

VARIABLE = "FASTRACK_WHEEL"  # the wheel to build: x86_64, aarch64 or pure
ARCHITECTURES = ("x86_64", "aarch64")
PURE = "pure"
WHEELS = (*ARCHITECTURES, PURE)
MODULE = "fastrack/_crypto/_native.abi3.so"
KERNELS = "fastrack/kernels"


class MachineCode(BuildHookInterface[Any]):
    """The hook: one wheel for every Python of an architecture, or a wheel without machine code for all platforms."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the machine code of a standard wheel and put it in, or that of an editable one in the checkout."""
        wheel = chosen_wheel()
        if wheel == PURE:
            return
        if version == "editable":
            generate(self.root, "fastrack._crypto.native")
            generate(self.root, "fastrack._devices.cuda.cubins")
            return
        made = Path(mkdtemp(prefix="fastrack-"), Path(MODULE).name)
        atexit.register(shutil.rmtree, made.parent)
        generate(self.root, "fastrack._crypto.native", "--architecture", wheel, "--output", str(made))
        build_data["force_include"][str(made)] = MODULE
        kernels = made.parent / "kernels"
        generate(self.root, "fastrack._devices.cuda.cubins", "--output", str(kernels))
        build_data["force_include"] |= {str(path): f"{KERNELS}/{path.name}" for path in sorted(kernels.iterdir())}
        build_data["pure_python"] = False
        build_data["tag"] = tag_of(wheel)


def chosen_wheel() -> str:
    """Return the wheel that the environment asks for, by default that with the most that this Python can install."""
    wheel = os.environ.get(VARIABLE)
    if not wheel:
        # musl, an older glibc, and a Python without the GIL, which has another ABI, can install no other than PURE.
        tags = {str(tag) for tag in sys_tags()}
        able = [each for each in ARCHITECTURES if f"cp311-abi3-manylinux_2_28_{each}" in tags]
        return able[0] if able else PURE
    if wheel not in WHEELS:
        raise ValueError(f"expected {VARIABLE} to be one of {', '.join(WHEELS)}, got {wheel!r}")
    return wheel


def tag_of(architecture: str) -> str:
    """Return the tag of a wheel. What the system's linker makes is bound to the glibc of this machine."""
    system = "manylinux_2_28" if find_spec("ziglang") else "linux"
    return f"cp311-abi3-{system}_{architecture}"


def generate(root: str, module: str, *options: str) -> None:
    """Run a generator of a source tree."""
    # It leaves nothing in the tree but what it is asked for.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(  # noqa: S603 - of this tree
        [sys.executable, "-m", module, *options], cwd=root, env=environment, check=True
    )
