"""``fastrack unseal``: authenticate and decrypt a file into plain files, on purpose."""

import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastrack.cli.console import clean, counted, pace, print_json, progress_bar, size_of, speed, stdout
from fastrack.cli.files import check_sealed, check_target, load_engine, open_ring
from fastrack.cli.options import Force, Json, KeyFiles
from fastrack.errors import FormatError

if TYPE_CHECKING:
    from fastrack.files import SealedFile
    from fastrack.keys import KeyRing

__all__ = ["unseal"]


def unseal(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The sealed file.")],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="The plain file: .safetensors, .npz, .npy, or any other for the bytes of one U8 tensor.",
        ),
    ],
    *,
    key: KeyFiles = None,
    tensor: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this tensor; may be repeated. Absent, all of them.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Decrypt a file into a plain one. Every byte is authenticated before it is written."""
    from fastrack.files import load_file

    check_target(target, force=force)
    ring = open_ring(key)
    with load_file(source) as file:
        check_sealed(file, ring)
        names = _choose(file, tensor)
        copied = [name for name in names if name in file.plain]
        total = sum(_nbytes(file, name) for name in names)
        load_engine("open")
        begun = time.perf_counter()
        with progress_bar("unsealing", total) as progress:
            _write(_Work(file, ring, progress), names, target)
        seconds = time.perf_counter() - begun
    if as_json:
        document = {
            "source": str(source),
            "target": str(target),
            "tensors": names,
            "bytes": total,
            "not_protected": copied,
            "seconds": seconds,
            "gb_per_s": speed(total, seconds),
        }
        print_json(document)
        return
    console = stdout()
    if copied:
        console.print(f"not protected, copied as stored: {', '.join(map(clean, copied))}", soft_wrap=True)
    console.print(
        f"{clean(str(target))}: {counted(len(names), 'tensor')} in plain, {size_of(total)}; {pace(total, seconds)}",
        soft_wrap=True,
    )


def _choose(file: "SealedFile", wanted: Sequence[str] | None) -> list[str]:
    unknown = sorted(set(wanted or ()) - set(file.names))
    if unknown:
        raise FormatError(
            f"{file.path} has no tensor {', '.join(map(repr, unknown))}; it has {', '.join(map(repr, file.names))}"
        )
    return [name for name in file.names if not wanted or name in wanted]


class _Work:
    """A sealed file, the keys to it, and whom to tell about bytes that were written."""

    def __init__(self, file: "SealedFile", ring: "KeyRing", progress: Callable[[int], None]) -> None:
        self.file = file
        self.ring = ring
        self.progress = progress

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name in self.file:
            tensor = self.file[name]
            return tensor.dtype, tensor.shape
        return self.file.stored(name)[:2]

    def write(self, name: str, out: Any) -> None:
        from fastrack.writer import write_plaintext

        if name in self.file:
            write_plaintext(self.file[name], self.ring, out, self.progress)
        else:
            memory = self.file.stored(name)[2]
            out.write(memory.data)
            self.progress(memory.size)


def _write(work: _Work, names: list[str], target: Path) -> None:
    suffix = target.suffix.lower()
    if suffix == ".safetensors":
        _write_safetensors(work, names, target)
    elif suffix == ".npz":
        _write_npz(work, names, target)
    elif suffix == ".npy":
        _write_npy(work, _only(names, work.file), target)
    else:
        _write_bytes(work, _only(names, work.file), target)


def _write_safetensors(work: _Work, names: list[str], target: Path) -> None:
    from fastrack.writer import unseal_file

    unseal_file(work.file.path, target, work.ring, names=names, progress=work.progress)


def _write_npz(work: _Work, names: list[str], target: Path) -> None:
    from fastrack.newfile import new_file

    headers = {name: _npy_header(*work.described(name)) for name in names}
    with new_file(target) as out, zipfile.ZipFile(out, "w") as archive:
        for name in names:
            # numpy.savez does the same: the size of a member is known only in its end.
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(headers[name])
                work.write(name, member)


def _write_npy(work: _Work, name: str, target: Path) -> None:
    from fastrack.newfile import new_file

    header = _npy_header(*work.described(name))
    with new_file(target) as out:
        out.write(header)
        work.write(name, out)


def _write_bytes(work: _Work, name: str, target: Path) -> None:
    from fastrack.newfile import new_file

    dtype, shape = work.described(name)
    if dtype != "U8":
        raise FormatError(
            f"tensor {name!r} is {dtype} {list(shape)}, no plain bytes; give TARGET a suffix that keeps its type: "
            ".safetensors, .npz or .npy"
        )
    with new_file(target) as out:
        work.write(name, out)


def _only(names: list[str], file: "SealedFile") -> str:
    if len(names) == 1:
        return names[0]
    if not names:
        raise FormatError(f"{file.path} holds no tensor; a .safetensors or .npz TARGET can be empty, this cannot")
    raise FormatError(
        f"this TARGET takes one tensor, and {file.path} gives {len(names)}: {', '.join(map(repr, names))}; choose one "
        "with --tensor, or a .safetensors or .npz TARGET for all"
    )


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    import io

    import numpy as np

    from fastrack import dtypes

    try:
        kind = dtypes.to_numpy(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.isbuiltin != 1:
        raise FormatError(f"NumPy files have no {dtype}; unseal to a .safetensors file")
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def _nbytes(file: "SealedFile", name: str) -> int:
    return int(file[name].nbytes) if name in file else file.stored(name)[2].nbytes
