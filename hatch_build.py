"""Build wheels with fastrack's native extension and kernels, by hooks of hatchling, which pyproject.toml names."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import sys_tags

VARIABLE = "FASTRACK_WHEEL"  # the wheel to build: x86_64, aarch64 or pure
EARLIER = "FASTRACK_KERNELS"  # a folder of compiled kernels: those of the same sources are not made again
ARCHITECTURES = ("x86_64", "aarch64")
PURE = "pure"
WHEELS = (*ARCHITECTURES, PURE)
MODULE = "fastrack/_crypto/_native.abi3.so"
KERNELS = "fastrack/kernels"
SITE = "https://fastrack-io.github.io/fastrack/"
FILES = "https://github.com/fastrack-io/fastrack/blob/main/"
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]*)")


class MachineCode(BuildHookInterface[Any]):
    """The hook: one wheel for every Python of an architecture, or a pure wheel for all platforms."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the native extension of a standard wheel and put it in, or that of an editable one in the checkout."""
        wheel = chosen_wheel()
        # The kernels stand at the top of the repository, where they are read and tested, and travel inside the package.
        sources = sorted(Path(self.root, "kernels").glob("*.cu*"))
        build_data["force_include"] |= {str(path): f"{KERNELS}/{path.name}" for path in sources}
        if wheel == PURE:
            return
        if version == "editable":
            generate(self.root, "fastrack_native")
            generate(self.root, "fastrack._devices.cuda.cubins")
            return
        made = Path(mkdtemp(prefix="fastrack-"), Path(MODULE).name)
        atexit.register(shutil.rmtree, made.parent)
        generate(self.root, "fastrack_native", "--architecture", wheel, "--output", str(made))
        build_data["force_include"][str(made)] = MODULE
        kernels = made.parent / "kernels"
        if earlier := os.environ.get(EARLIER):
            shutil.copytree(earlier, kernels)
        generate(self.root, "fastrack._devices.cuda.cubins", "--output", str(kernels))
        build_data["force_include"] |= {str(path): f"{KERNELS}/{path.name}" for path in sorted(kernels.iterdir())}
        build_data["pure_python"] = False
        build_data["tag"] = tag_of(wheel)


class Description(MetadataHookInterface):
    """The description of the project: README.md, with links that lead somewhere from a package index, too."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text)}


def with_absolute_links(text: str) -> str:
    """Return a Markdown text of the root, with links to pages of the site and to files of the repository."""
    return LINK.sub(lambda link: f"]({address_of(link[1])}", text)


def address_of(name: str) -> str:
    """Return where a file of the repository is shown: a page of the site, or the file itself."""
    page = re.fullmatch(r"docs/(.*)\.md", name)
    return f"{SITE}{page[1]}.html" if page else f"{FILES}{name}"


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
    # It leaves nothing in the tree but what it is asked for. The generator of host code is beside the kernels.
    path = os.pathsep.join([root, str(Path(root, "kernels")), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": path}
    subprocess.run(  # noqa: S603 - of this tree
        [sys.executable, "-m", module, *options], cwd=root, env=environment, check=True
    )
