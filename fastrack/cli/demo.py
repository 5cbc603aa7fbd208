"""``fastrack demo``: everything once, on real data, in plain steps."""

import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastrack.cli.bench import draw_rows, measure, require, show_rows
from fastrack.cli.console import clean, size_of, stdout
from fastrack.cli.files import check_directory
from fastrack.cli.inspect import read_contents, show_contents
from fastrack.cli.verify import show_report, verify_contents
from fastrack.errors import AuthenticationError, FastrackError

if TYPE_CHECKING:
    from fastrack.keys import Key

__all__ = ["demo"]

_SIZES = (16.0, 64.0, 256.0)
_ROWS = [3, 1, 4]
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def demo(
    *,
    directory: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to put files meanwhile.")] = None,
    picture: Annotated[Path, typer.Option(metavar="PATH", help="Where to save the figures as a bar chart.")] = Path(
        "fastrack-demo.png"
    ),
    size: Annotated[
        list[float] | None,
        typer.Option(metavar="MIB", min=1 / 1024, help="Size to measure in MiB; may be repeated."),
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds of measurement.")] = 5,
) -> None:
    """Seal real data, open it, watch a forgery be refused, and compare speeds. Leaves nothing but a picture."""
    for package in ("sklearn", "matplotlib"):
        require(package)
    check_directory(picture)
    if directory is not None:
        check_directory(directory / "any")
    console = stdout()
    with tempfile.TemporaryDirectory(prefix="fastrack-demo-", dir=directory) as place:
        _tour(Path(place), console)
    _step(console, 6, f"How fast? Every path to the device, at {', '.join(f'{mib:g}' for mib in size or _SIZES)} MiB.")
    rows = measure(size or _SIZES, 256, repeat)
    show_rows(rows, console)
    draw_rows(rows, picture)
    console.print(f"\nPicture: {clean(str(picture.resolve()))}", soft_wrap=True)
    console.print("Everything else that the demo wrote, the key included, was removed.")


def _tour(place: Path, console: Console) -> None:
    from fastrack.keys import Key
    from fastrack.writer import save_file

    _step(console, 1, "The owner of the data makes a key, in a file that only its owner may read.")
    Key.generate().save(place / "owner.key")
    key = Key.load(place / "owner.key")
    console.print(f"a {key.bits}-bit key; its id, which is no secret, is {key.id}")

    _step(console, 2, "The owner seals two data sets: handwritten digits, and the source of Python's standard library.")
    tensors = {**_digits(), **_library()}
    for name, array in tensors.items():
        console.print(f"{name:<8} {array.dtype!s:<8} {list(array.shape)!s:<12} {size_of(array.nbytes):>10}")
    path = place / "data.safetensors"
    save_file(tensors, path, key)

    _step(console, 3, "Anyone may see what is in the file, and no more than this.")
    show_contents(read_contents(path), console)

    _step(console, 4, "The direct path: each tensor goes to the device as it was sealed, and is opened there.")
    _deliver(path, key, tensors, console)

    _step(console, 5, "Someone changes one byte of a copy of the file.")
    _forge(path, place / "forged.safetensors", key, console)
    key.wipe()


def _step(console: Console, number: int, text: str) -> None:
    console.print(f"\n{number}. {text}\n", style="bold", soft_wrap=True)


def _digits() -> dict[str, Any]:
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    return {"images": digits.data.astype(np.float32), "labels": digits.target.astype(np.int64)}


def _library() -> dict[str, Any]:
    """All source files of the standard library, end to end, and where each of them starts."""
    import numpy as np

    top = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in top.rglob("*.py") if not _SKIPPED & {*path.relative_to(top).parts})
    texts = [path.read_bytes() for path in files]
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return {"source": np.frombuffer(b"".join(texts), np.uint8), "starts": starts}


def _deliver(path: Path, key: "Key", tensors: dict[str, Any], console: Console) -> None:
    from fastrack.files import load_file
    from fastrack.shared import to_device

    with load_file(path) as file:
        for name, original in tensors.items():
            arrived = to_device(file[name], keys=key)
            _require_same(name, arrived, original)
            framework = type(arrived).__module__.partition(".")[0]
            where = getattr(arrived, "device", "cpu")
            console.print(f"{name:<8} arrived on {where} as a {framework} array, every bit the same", soft_wrap=True)
        rows = to_device(file["images"][_ROWS], keys=key)
        _require_same("images", rows, tensors["images"][_ROWS])
        console.print(
            f"images{_ROWS}: three rows by number; only the chunks that hold them were opened", soft_wrap=True
        )


def _require_same(name: str, arrived: Any, original: Any) -> None:
    import numpy as np

    if np.asarray(arrived).tobytes() != original.tobytes():
        raise FastrackError(f"{name!r} arrived as something else than was sealed; please report this")


def _forge(path: Path, forged: Path, key: "Key", console: Console) -> None:
    from fastrack.cobblestone import CHUNK, chunk_offset
    from fastrack.files import load_file
    from fastrack.keys import KeyRing
    from fastrack.shared import to_device

    data = bytearray(path.read_bytes())
    with load_file(path) as file:
        message = file["source"].message
        chunk = file["source"].nbytes // CHUNK // 2
        place = data.index(bytes(message[:56])) + chunk_offset(chunk)
    data[place] ^= 1
    forged.write_bytes(data)
    with load_file(forged) as file:
        try:
            to_device(file["source"], keys=key)
        except AuthenticationError as error:
            console.print(f"refused: {error}", soft_wrap=True)
        else:
            raise FastrackError("the forgery was accepted; please report this")
    console.print("\n`fastrack verify` tells how far the damage goes:\n")
    show_report(verify_contents(forged, KeyRing(key)), console)
