"""``fastrack demo``: a tour on real data, step by step."""

import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from rich.console import Console

from fastrack._bench.plots import check_picture, draw_ablation
from fastrack._cli.commands.bench import Wide, measure, show_ablation, show_speeds
from fastrack._cli.commands.inspect import read_contents
from fastrack._cli.console import clean, reporter
from fastrack._cli.files import check_directory, check_target
from fastrack._cli.measurements import narrow_console, wide_console
from fastrack._files.verify import check_file
from fastrack._files.writer import save_file
from fastrack._keys.keys import Key
from fastrack._sets.load_file import load_file
from fastrack._transfer.api import to_device
from fastrack._util.shown import format_size
from fastrack.errors import AuthenticationError, FastrackError
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, chunk_offset

_SIZES = (16.0, 256.0)
_WIDTH = 64  # characters of a row
_ROWS = [3, 1, 4]
_BATCH = 512
_POINTS = 20  # of the curve of losses
_NOTICED = 0.05  # ms a batch
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def demo(
    *,
    directory: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for temporary files.")] = None,
    picture: Annotated[Path, typer.Option(metavar="PATH", help="File for the chart.")] = Path("fastrack-demo.png"),
    size: Annotated[
        list[float] | None, typer.Option(metavar="MIB", min=1 / 1024, help="Size to measure in MiB; may be repeated.")
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds of measurement.")] = 5,
    wide: Wide = False,
) -> None:
    """Seal real data, open it, train on it, refuse a forgery, and measure speeds. Only a chart is left."""
    check_picture(picture)
    check_target(picture, force=True)
    if directory is not None:
        check_directory(directory / "any")
    console = narrow_console()
    with tempfile.TemporaryDirectory(prefix="fastrack-demo-", dir=directory) as folder:
        losses = _tour(Path(folder), console)
    _step(console, 7, "How fast does a tensor reach the device? One idea after another:")
    rows = measure(size or _SIZES, device="cpu", bits=256, repeat=repeat, directions=("to_device",))
    if wide:
        show_ablation(rows, "cpu", wide_console())
    else:
        show_speeds(rows, "cpu", console)
    draw_ablation(rows, "cpu", picture, losses)
    console.print(f"\nPicture: {clean(str(picture))}", soft_wrap=True)
    console.print("Everything else that the demo wrote, the key included, was removed.")


def _tour(folder: Path, console: Console) -> list[float]:
    """Run the steps that take the key, and return losses along the training."""
    _step(console, 1, "The owner of the data makes a key, in a file that only its owner may read.")
    Key.generate().save(folder / "owner.key")
    key = Key.load(folder / "owner.key")
    console.print(f"a {key.bits}-bit key; its id, which is no secret, is {key.id}")

    _step(console, 2, "The owner seals a body of text: the source of Python's standard library.")
    with reporter("reading"):
        tensors = _library()
    path = folder / "data.safetensors"
    start = time.perf_counter()
    save_file(tensors, path, key)
    seconds = time.perf_counter() - start
    console.print(f"text: {len(tensors['text']):,} rows of {_WIDTH} characters")
    console.print(f"files: where each of {len(tensors['files'])} files begins")
    console.print(f"sealed, and on disk as {path.name}, in {1000 * seconds:.0f} ms")

    _step(console, 3, "Names, dtypes and shapes can be read without the key, and no more than this.")
    contents = read_contents(path)
    for entry in contents.tensors:
        size = format_size(entry.plain_bytes)
        console.print(f"{entry.name:<6} {entry.dtype:<4} {list(entry.shape)!s:<13} {size:>9}")
    console.print(f"The file is {contents.overhead_percent:.2f} % larger than its tensors.")

    _step(console, 4, "Each tensor is sent to the device as it was sealed, and is opened there.")
    if find_spec("torch"):
        with reporter("loading torch"):  # which takes seconds the first time
            import_module("torch")
    _deliver(path, key, tensors, console)

    _step(console, 5, "A model learns to guess the next character, on sealed and on plain data.")
    losses = _train_twice(path, key, tensors["text"], console)

    _step(console, 6, "One byte of a copy of the file is changed.")
    _forge(path, folder / "forged.safetensors", key, console)
    key.wipe()
    return losses


def _step(console: Console, number: int, text: str) -> None:
    console.print(f"\n{number}. {text}\n", style="bold")


def _library() -> dict[str, Any]:
    """Return all source files of the standard library, concatenated and cut into rows, and the start of each file."""
    import numpy as np

    top = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in top.rglob("*.py") if not _SKIPPED & {*path.relative_to(top).parts})
    texts = [path.read_bytes() for path in files]
    characters = np.frombuffer(b"".join(texts), np.uint8)
    rows = len(characters) // _WIDTH
    return {
        "text": characters[: rows * _WIDTH].reshape(rows, _WIDTH),
        "files": np.cumsum([0, *map(len, texts[:-1])], dtype=np.int64),
    }


def _deliver(path: Path, key: Key, tensors: dict[str, Any], console: Console) -> None:
    with load_file(path) as file:
        for name, original in tensors.items():
            arrived = to_device(file[name], keys=key)
            _require_same(name, arrived, original)
            framework = type(arrived).__module__.partition(".")[0]
            console.print(f"{name}: arrived as a {framework} array, every bit the same")
        rows = to_device(file["text"][_ROWS], keys=key)
        _require_same("text", rows, tensors["text"][_ROWS])
        console.print(f"text{_ROWS}: three rows by number; only the chunks that hold them were opened")
    console.print("The device is this CPU. A GPU opens in its own memory, past the host.")


def _require_same(name: str, arrived: Any, original: Any) -> None:
    import numpy as np

    if np.asarray(arrived).tobytes() != original.tobytes():
        raise FastrackError(f"{name!r} arrived with other bytes than were sealed; please report this")


def _train_twice(path: Path, key: Key, text: Any, console: Console) -> list[float]:
    if not find_spec("torch"):
        console.print("left out, as torch is not installed: pip install 'fastrack-io[torch]'")
        return []
    import torch
    from torch.utils.data import DataLoader

    from fastrack._training.collate import collate
    from fastrack._training.dataset import SealedDataset
    from fastrack._training.loader import wrap

    def shuffled() -> dict[str, Any]:
        return {"batch_size": _BATCH, "shuffle": True, "generator": torch.Generator().manual_seed(0)}

    arrays: Any = _Rows(torch.tensor(text))
    sealed: Any = SealedDataset(path, ["text"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small gains nothing by more
    try:
        with reporter("training on arrays:") as report:
            on_plain = _train(DataLoader(arrays, collate_fn=lambda batch: batch, **shuffled()), report)
        with reporter("training on the sealed file:") as report:
            on_sealed = _train(wrap(DataLoader(sealed, collate_fn=collate, **shuffled()), keys=key), report)
    finally:
        torch.set_num_threads(threads)
    if on_sealed[:2] != on_plain[:2]:
        raise FastrackError("training on sealed data gave other weights than on plain arrays; please report this")
    losses = on_sealed[0]
    part = max(1, len(losses) // _POINTS)
    curve = [fmean(losses[start : start + part]) for start in range(0, len(losses), part)]
    console.print(f"{len(losses)} batches of {_BATCH} rows; loss {curve[0]:.2f} -> {curve[-1]:.2f}, bit for bit alike")
    sealed_ms, plain_ms = on_sealed[2], on_plain[2]
    console.print(f"a batch: {sealed_ms:.1f} ms from the sealed file, {plain_ms:.1f} ms from arrays in memory")
    console.print(_explain(sealed_ms - plain_ms))
    return curve


class _Rows:
    """A dataset of rows in memory, which gives a batch at a time, as a sealed one does."""

    def __init__(self, text: Any) -> None:
        self._text = text

    def __len__(self) -> int:
        return len(self._text)

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        return {"text": self._text[numbers]}


def _explain(more: float) -> str:
    """Return a sentence on the milliseconds that a batch from the sealed file takes more."""
    if more < _NOTICED:
        return (
            "Sealed costs nothing that is seen here: while the model learns from one batch, the next one is read, "
            "checked and opened."
        )
    return (
        f"These {more:.1f} ms are what sealing costs a batch, whatever the model: rows in random order are read, "
        f"checked and opened, where arrays lie in memory for all to read. At 100 ms a batch it is {more:.1f} %."
    )


def _train(loader: Iterable[Any], report: Callable[[str], None]) -> tuple[list[float], bytes, float]:
    """Train a model for an epoch, and return the loss of each batch, the weights, and a batch's milliseconds."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        guess = nn.Sequential(nn.Linear(8 * (_WIDTH - 1), 128), nn.ReLU(), nn.Linear(128, 256))
        model = nn.Sequential(nn.Embedding(256, 8), nn.Flatten(), guess)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    times = [time.perf_counter()]
    for number, batch in enumerate(loader, 1):
        report(f"batch {number}")
        rows = batch["text"].long()
        loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter())
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return losses, weights, 1000 * median(stop - start for start, stop in pairwise(times))


def _forge(path: Path, forged: Path, key: Key, console: Console) -> None:
    data = bytearray(path.read_bytes())
    with load_file(path) as file:
        message = file["text"].message
        chunk = file["text"].nbytes // CHUNK_SIZE // 2
        offset = data.index(bytes(message[:HEADER_SIZE])) + chunk_offset(chunk)
    data[offset] ^= 1
    forged.write_bytes(data)
    with load_file(forged) as file:
        try:
            to_device(file["text"], keys=key)
        except AuthenticationError as error:
            console.print(f"refused: {clean(str(error))}".replace(f"{clean(str(forged.parent))}/", ""))
        else:
            raise FastrackError("the forgery was accepted; please report this")
    console.print("\n`fastrack verify` shows which tensors were altered:\n")
    for check in check_file(forged, key):
        failed = getattr(check.error, "chunk", None)
        console.print(f"{check.name:<6} {'ok' if check.error is None else f'FAILED at chunk {failed}'}")
