"""Compile CUDA sources with NVRTC, as CuPy does when a device is opened. Needs no GPU and no driver."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

NAME = re.compile(r"libnvrtc\.so\.\d+$")
# What CuPy 14 adds to the options of `fastrack._devices.cuda.nvrtc.Kernels`.
OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "-ftz=true")


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """A loaded libnvrtc."""

    library: ctypes.CDLL
    name: str

    @classmethod
    def load(cls, path):
        """Load libnvrtc.

        Raises
        ------
        OSError
            If the file is no library for this machine.
        """
        # NVRTC loads its builtins by name, which the loader finds once they are in the process. A second version of
        # NVRTC in the same process brings builtins of another name.
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))
        library = ctypes.CDLL(str(path))
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return cls(library, version_of(path))

    def compile(self, source, architecture, folder, options=(), what="CUBIN"):
        """Compile a source for an architecture such as "sm_90": the cubin or PTX, and what is reported."""
        program = ctypes.c_void_p()
        code = source.read_text().encode()
        self._check("nvrtcCreateProgram", ctypes.byref(program), code, source.name.encode(), 0, None, None)
        try:
            given = (*OPTIONS, f"-I{folder}", f"-arch={architecture}", "--ptxas-options=-v", *options)
            array = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
            status = self.library.nvrtcCompileProgram(program, len(given), array)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode()
            assert status == 0, f"{source}: {log}"
            return self._bytes(program, what), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def version(self):
        """Return the version of CUDA, such as (13, 3)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def architectures(self):
        """Architectures that this version compiles for, as numbers: 80, 90, ..."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", found)
        return list(found)

    def _bytes(self, program, what):
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", program, content)
        return content.raw

    def _check(self, function, *arguments):
        status = getattr(self.library, function)(*arguments)
        assert status == 0, f"{function}: {self.library.nvrtcGetErrorString(status).decode()}"


def find_libraries():
    """Paths of libnvrtc: that of the installed wheel, then those in the folders that FASTRACK_NVRTC names."""
    try:
        installed = [Path(file.locate()) for file in files("nvidia-cuda-nvrtc") or () if NAME.search(file.name)]
    except PackageNotFoundError:
        installed = []
    folders = filter(None, os.environ.get("FASTRACK_NVRTC", "").split(os.pathsep))
    named = (path for folder in folders for path in sorted(Path(folder).rglob("libnvrtc.so.*")))
    return [*installed, *(path for path in named if NAME.search(path.name))]


def version_of(path):
    """Return the version with its third number, which only the metadata of the wheel tells."""
    for folder in path.parents[2:5]:
        for found in folder.glob("nvidia_cuda_nvrtc*-*.dist-info"):  # that of CUDA 12 has another name
            return found.name.removesuffix(".dist-info").partition("-")[2]
    return path.name
