"""Compile CUDA sources with NVRTC, as fastrack's build does. Needs no GPU and no driver."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from fastrack._devices.cuda import cubins, nvrtc

OPTIONS = cubins.OPTIONS
KERNELS = nvrtc.KERNELS


class Nvrtc(cubins.Nvrtc):
    """A loaded libnvrtc, with its version as `name`."""

    @classmethod
    def load(cls, path):
        """Load libnvrtc. Raise OSError if the file is no library for this machine."""
        library = cls(path)
        library.name = version_of(path)
        return library

    def compile(self, source, architecture, folder, options=()):
        """Compile a source for an architecture such as "sm_90": the cubin, and what the compiler reports."""
        given = (*OPTIONS, f"-I{folder}", f"-arch={architecture}", "--ptxas-options=-v", *options)
        cubin, _, log = self.compile_program(source.name, source.read_bytes(), {}, given)
        return cubin, log

    def architectures(self):
        """Architectures that this version compiles for, as numbers: 80, 90, ..."""
        count = ctypes.c_int()
        self.call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self.call("nvrtcGetSupportedArchs", found)
        return list(found)


def find_libraries():
    """Paths of libnvrtc: that of the installed wheel, then those in the folders that FASTRACK_NVRTC names."""
    folders = filter(None, os.environ.get("FASTRACK_NVRTC", "").split(os.pathsep))
    named = (path for folder in folders for path in sorted(Path(folder).rglob("libnvrtc.so.*")))
    return [*cubins.find_libraries(), *(path for path in named if cubins.NAME.search(path.name))]


def version_of(path):
    """Return the version with its third number, which only the metadata of the wheel tells."""
    for folder in path.parents[2:5]:
        for found in folder.glob("nvidia_cuda_nvrtc*.dist-info"):
            return found.name.partition("-")[2].removesuffix(".dist-info")
    return path.name
