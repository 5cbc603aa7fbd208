"""Compile the kernels when fastrack is built: ``python -m fastrack._devices.cuda.cubins``. No GPU is needed."""

from __future__ import annotations

import argparse
import ctypes
import lzma
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from fastrack._devices.cuda.nvrtc import CUBINS, MAIN, PTX, Kernels, find_kernels

OPTIONS = ("-std=c++17",)
PACKAGE = "nvidia-cuda-nvrtc"
NAME = re.compile(r"libnvrtc\.so\.\d+$")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fastrack._devices.cuda.cubins", description=__doc__)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="by default where a checkout looks for them")
    folder = parser.parse_args().output
    libraries, sources = find_libraries(), find_kernels()
    if not libraries:
        if folder is not None:
            raise SystemExit(f"compiling the kernels failed: expected NVRTC, got none. Run `pip install {PACKAGE}`")
        return  # a checkout does without: CuPy compiles them when a GPU is opened
    make(libraries[0], sources, folder or sources.image(PTX).parent)


def make(library: Path, sources: Kernels, folder: Path) -> None:
    """Fill a folder with those compiled kernels that it lacks. Those of other sources are removed."""
    paths = {name: folder / sources.image(name).name for name in (*CUBINS, PTX)}
    folder.mkdir(parents=True, exist_ok=True)
    for old in {path for end in ("cubin*", "ptx*", "part") for path in folder.glob(f"*.{end}")} - {*paths.values()}:
        old.unlink()
    missing = {name: path for name, path in paths.items() if not path.exists()}
    if not missing:
        return
    start = time.perf_counter()
    nvrtc = Nvrtc(library)
    # Headers by their names, so that no path gets into the result.
    headers = {path.name: path.read_bytes() for path in sorted(sources.folder.glob("*.cuh"))}
    for name, path in missing.items():
        cubin, ptx, _ = nvrtc.compile_program(MAIN, sources.code.encode(), headers, (*OPTIONS, f"-arch={name}"))
        part = path.with_suffix(".part")
        # Instructions have 16 bytes: contexts by the position in them make cubins 4 % smaller, and not PTX, a text.
        tuned = {"id": lzma.FILTER_LZMA2, "preset": 9, **({} if name == PTX else {"lc": 0, "lp": 4, "pb": 4})}
        part.write_bytes(lzma.compress(ptx.rstrip(b"\0") if name == PTX else cubin, filters=[tuned]))
        part.replace(path)
    print(f"kernels for {', '.join(missing)}: {time.perf_counter() - start:.0f} s")  # noqa: T201


def find_libraries() -> list[Path]:
    """Return the path of the installed wheel's libnvrtc, if there is one."""
    try:
        return [Path(str(file.locate())) for file in files(PACKAGE) or () if NAME.search(file.name)]
    except PackageNotFoundError:
        return []


class Nvrtc:
    """NVIDIA's compiler. Raise OSError if the file at `path` is no library for this machine."""

    def __init__(self, path: Path) -> None:
        # NVRTC loads its builtins by name, which the loader finds once they are in the process. A second version of
        # NVRTC in the same process brings builtins of another name.
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))
        self.library = ctypes.CDLL(str(path))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile_program(
        self, name: str, code: bytes, headers: Mapping[str, bytes], options: Sequence[str]
    ) -> tuple[bytes, bytes, str]:
        """Return the cubin, which is empty for a virtual architecture, the PTX, and what the compiler reports.

        Raise RuntimeError if the code does not compile.
        """
        program = ctypes.c_void_p()
        contents, names = _strings(headers.values()), _strings(each.encode() for each in headers)
        self.call("nvrtcCreateProgram", ctypes.byref(program), code, name.encode(), len(headers), contents, names)
        try:
            status = self.library.nvrtcCompileProgram(program, len(options), _strings(map(str.encode, options)))
            log = self._output(program, "ProgramLog").rstrip(b"\0").decode()
            if status:
                raise RuntimeError(f"compiling {name} with {' '.join(options)} failed:\n{log}")
            return self._output(program, "CUBIN"), self._output(program, "PTX"), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def call(self, function: str, *arguments: object) -> None:
        """Call a function of the library. Raise RuntimeError if it fails."""
        status = getattr(self.library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} failed: {self.library.nvrtcGetErrorString(status).decode()}")

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, content)
        return content.raw


def _strings(values: Iterable[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    items = list(values)
    return (ctypes.c_char_p * len(items))(*items)


if __name__ == "__main__":
    main()
