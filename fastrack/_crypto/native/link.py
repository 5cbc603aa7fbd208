"""Link object code to a shared object, by zig's linker, or by that of the system for this machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from fastrack._crypto.native.target import Target

GLIBC = "2.28"  # the oldest that a wheel is for, that of manylinux_2_28

# Without code of a compiler; all is bound when it is loaded and then read-only; no stack is executable; a relocation of
# the text is an error, which zig's linker takes for granted.
_OPTIONS = ["-shared", "-nostdlib", "-Wl,-z,relro,-z,now,-z,noexecstack,-s,--build-id=none"]
_LIBRARIES = ["-lc", "-lpthread"]


def link(code: bytes, target: Target, path: Path) -> str:
    """Write a shared object of object code, and return the name of the linker. A file at `path` is replaced."""
    zig = find_spec("ziglang") is not None
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{target.architecture}-linux-gnu.{GLIBC}"]
    if not zig:
        compiler = os.environ.get("CC") or "cc"
        if platform.machine() != target.architecture or shutil.which(compiler) is None:
            raise RuntimeError(
                f"linking for {target.architecture} failed: expected ziglang, or a C compiler of a machine of that "
                "architecture, got neither. Run `pip install ziglang`"
            )
        command = [compiler, "-Wl,-z,text"]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".native-") as folder:
        # Without a place of its own zig would write to the home of the user.
        environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        source, made = Path(folder, "native.o"), Path(folder, "native.so")
        source.write_bytes(code)
        subprocess.run([*command, *_OPTIONS, "-o", made, source, *_LIBRARIES], check=True, env=environment)  # noqa: S603 - of this machine
        made.chmod(0o755)
        made.replace(path)
    return "ziglang" if zig else compiler
