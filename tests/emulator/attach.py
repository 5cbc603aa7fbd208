"""Put the emulator under the CuPy of this process, which then finds emulated devices.

CuPy links NVIDIA's runtime statically. So the first bytes of each `cuda*` function in its library are overwritten by a
jump to the emulator's function, or to one that prints what is missing. The driver API and NVML need no jumps: opening
libcuda.so.1 or libnvidia-ml.so.1 gives the library of that soname that the process has loaded already.
"""

import ctypes
import mmap
import re
import struct
import subprocess
import sys
from pathlib import Path

from emulator.build import build_driver, build_kernels, build_nvml

NOT_SUPPORTED = 801  # cudaErrorNotSupported
SYMBOL = re.compile(r"^([0-9a-f]+) ([0-9a-f]+) t (cuda[A-Z]\w*)$", re.MULTILINE)
JUMP = struct.Struct("<2sQ2s")  # mov rax, address; jmp rax
JUMP_SIZE = JUMP.size
ROOM = 1 << 16

_Missing = ctypes.CFUNCTYPE(ctypes.c_int)


class Emulator:
    """Attach the emulator to this process, count its calls and its violations."""

    def __init__(self):
        self._nvml = ctypes.CDLL(str(build_nvml()), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(build_driver()), mode=ctypes.RTLD_GLOBAL)
        self.library.emulator_violations.restype = ctypes.c_uint64
        self.library.emulator_calls_after_fork.restype = ctypes.c_uint64
        if self.library.emulator_load_kernels(str(build_kernels()).encode()):
            raise RuntimeError("the kernels cannot be loaded for the emulator; remove build/emulator")
        self._missing = []  # keeps the functions that jumps lead to
        self._replace_runtime()

    def calls(self):
        """Return the number of calls so far, by the name of the function."""
        text = ctypes.create_string_buffer(ROOM)
        if self.library.emulator_calls(text, ctypes.c_uint64(ROOM)):
            raise RuntimeError(f"the emulator counts more calls than fit into {ROOM} bytes; raise ROOM")
        lines = (line.rpartition(" ") for line in text.value.decode().splitlines())
        return {name: int(number) for name, _, number in lines}

    def reset(self):
        """Start counting calls and violations again."""
        self.library.emulator_reset()

    @property
    def calls_after_fork(self):
        """Return the number of calls in this process if it is a forked child, where CUDA does not work."""
        return self.library.emulator_calls_after_fork()

    @property
    def violations(self):
        """Return the number of uses that CUDA forbids or leaves undefined. Each has been printed."""
        return self.library.emulator_violations()

    def _replace_runtime(self):
        from cupy_backends.cuda.api import runtime

        path = Path(runtime.__file__).resolve()
        base = _base_of(path)
        listing = subprocess.run(["nm", "-S", path], capture_output=True, text=True, check=True).stdout
        for offset, size, name in SYMBOL.findall(listing):
            if int(size, 16) < JUMP_SIZE:
                raise RuntimeError(f"{name} is too short for a jump; this CuPy needs another emulator")
            function = getattr(self.library, f"emulated_{name}", None) or self._name_missing(name)
            _write_jump(base + int(offset, 16), ctypes.cast(function, ctypes.c_void_p).value)

    def _name_missing(self, name):
        def tell():
            sys.stderr.write(f"emulator: {name} is not emulated\n")
            return NOT_SUPPORTED

        self._missing.append(_Missing(tell))
        return self._missing[-1]


def _base_of(path):
    """Return the address that a loaded library starts at."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, _, *name = line.split()
        if name == [str(path)] and int(offset, 16) == 0:
            return int(addresses.split("-")[0], 16)
    raise RuntimeError(f"{path} is not loaded; expected a CuPy of which the runtime is a library of its own")


def _write_jump(address, target):
    page = address & -mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    access = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), access):
        raise OSError(ctypes.get_errno(), "mprotect failed; the emulator cannot replace CuPy's runtime")
    ctypes.memmove(address, JUMP.pack(b"\x48\xb8", target, b"\xff\xe0"), JUMP_SIZE)
