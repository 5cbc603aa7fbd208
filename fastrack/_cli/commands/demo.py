"""``fastrack demo``: a tour on real data, step by step."""

import sysconfig
import tempfile
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastrack._bench.plots import check_picture, draw_ablation, require
from fastrack._cli.commands.bench import measure, show_ablation
from fastrack._cli.commands.inspect import describe_contents, read_contents
from fastrack._cli.commands.verify import verify_contents
from fastrack._cli.console import clean, print_lines, stdout
from fastrack._cli.files import check_directory, check_target
from fastrack._cli.run import Meter
from fastrack._util.units import format_size
from fastrack.errors import AuthenticationError, FastrackError

if TYPE_CHECKING:
    from fastrack._keys.keys import Key

_SIZES = (16.0, 64.0, 256.0)
_ROWS = [3, 1, 4]
_EPOCHS = 20
_BATCH = 64
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def demo(
    *,
    directory: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for temporary files.")] = None,
    picture: Annotated[Path, typer.Option(metavar="PATH", help="File for the chart.")] = Path("fastrack-demo.png"),
    size: Annotated[
        list[float] | None, typer.Option(metavar="MIB", min=1 / 1024, help="Size to measure in MiB; may be repeated.")
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds of measurement.")] = 5,
) -> None:
    """Seal real data, open it, train on it, refuse a forgery, and measure speeds. Only a chart is left."""
    require("sklearn")
    check_picture(picture)
    check_target(picture, force=True)
    if directory is not None:
        check_directory(directory / "any")
    console = stdout()
    with tempfile.TemporaryDirectory(prefix="fastrack-demo-", dir=directory) as folder:
        losses = _tour(Path(folder), console)
    sizes = ", ".join(f"{mib:g}" for mib in size or _SIZES)
    _step(console, 7, f"How fast? From the bounce path to fastrack, one idea after another, at {sizes} MiB.")
    rows = measure(size or _SIZES, device="cpu", bits=256, repeat=repeat, directions=("to_device",))
    show_ablation(rows, "cpu", console)
    draw_ablation(rows, "cpu", picture, losses)
    console.print(f"\nPicture: {clean(str(picture.resolve()))}")
    console.print("Everything else that the demo wrote, the key included, was removed.")


def _tour(folder: Path, console: Console) -> list[float]:
    """Run the steps that take the key, and return the loss of each epoch of training."""
    from fastrack._files.writer import save_file
    from fastrack._keys.keys import Key

    _step(console, 1, "The owner of the data makes a key, in a file that only its owner may read.")
    Key.generate().save(folder / "owner.key")
    key = Key.load(folder / "owner.key")
    console.print(f"a {key.bits}-bit key; its id, which is no secret, is {key.id}")

    _step(console, 2, "The owner seals two data sets: handwritten digits, and the source of Python's standard library.")
    tensors = {**_digits(), **_library()}
    for name, array in tensors.items():
        console.print(f"{name:<8} {array.dtype!s:<8} {list(array.shape)!s:<12} {format_size(array.nbytes):>10}")
    path = folder / "data.safetensors"
    save_file(tensors, path, key)

    _step(console, 3, "Names, dtypes and shapes can be read without the key, and no more than this.")
    print_lines(describe_contents(read_contents(path)))

    _step(console, 4, "The direct path: each tensor is sent to the device as it was sealed, and is opened there.")
    _deliver(path, key, tensors, console)

    _step(console, 5, "A classifier of the digits is trained on the sealed file, and again on the plain arrays.")
    losses = _train_twice(path, key, tensors, console)

    _step(console, 6, "One byte of a copy of the file is changed.")
    _forge(path, folder / "forged.safetensors", key, console)
    key.wipe()
    return losses


def _step(console: Console, number: int, text: str) -> None:
    console.print(f"\n{number}. {text}\n", style="bold")


def _digits() -> dict[str, Any]:
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    return {"images": digits.data.astype(np.float32), "labels": digits.target.astype(np.int64)}


def _library() -> dict[str, Any]:
    """Return all source files of the standard library, concatenated, and the start of each."""
    import numpy as np

    top = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in top.rglob("*.py") if not _SKIPPED & {*path.relative_to(top).parts})
    texts = [path.read_bytes() for path in files]
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return {"source": np.frombuffer(b"".join(texts), np.uint8), "starts": starts}


def _deliver(path: Path, key: "Key", tensors: dict[str, Any], console: Console) -> None:
    from fastrack._sets.load_file import load_file
    from fastrack._transfer.api import to_device

    with load_file(path) as file:
        for name, original in tensors.items():
            arrived = to_device(file[name], keys=key)
            _require_same(name, arrived, original)
            framework = type(arrived).__module__.partition(".")[0]
            device = getattr(arrived, "device", "cpu")
            console.print(f"{name:<8} arrived on {device} as a {framework} array, every bit the same")
        rows = to_device(file["images"][_ROWS], keys=key)
        _require_same("images", rows, tensors["images"][_ROWS])
        console.print(f"images{_ROWS}: three rows by number; only the chunks that hold them were opened")


def _require_same(name: str, arrived: Any, original: Any) -> None:
    import numpy as np

    if np.asarray(arrived).tobytes() != original.tobytes():
        raise FastrackError(f"{name!r} arrived with other bytes than were sealed; please report this")


def _train_twice(path: Path, key: "Key", tensors: dict[str, Any], console: Console) -> list[float]:
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

    images, labels = torch.tensor(tensors["images"]), torch.tensor(tensors["labels"])
    samples = [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    data: Any = SealedDataset(path, ["images", "labels"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small gains nothing by more
    try:
        on_plain = _train(DataLoader(samples, **shuffled()))  # type: ignore[arg-type]
        on_sealed = _train(wrap(DataLoader(data, collate_fn=collate, **shuffled()), keys=key))
    finally:
        torch.set_num_threads(threads)
    if on_sealed[:2] != on_plain[:2]:
        raise FastrackError("training on sealed data gave other weights than on plain arrays; please report this")
    losses = [mean(epoch) for epoch in on_sealed[0]]
    console.print(f"{_EPOCHS} epochs, loss {losses[0]:.2f} -> {losses[-1]:.3f}, equal bit for bit on both")
    console.print(f"an epoch took {on_sealed[2]:.0f} ms on the sealed file, {on_plain[2]:.0f} ms on the arrays")
    return losses


def _train(loader: Iterable[Any]) -> tuple[list[list[float]], bytes, float]:
    """Train a model, and return the losses of the steps of each epoch, the weights, and an epoch's milliseconds."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses: list[list[float]] = []
    seconds = []
    for _ in range(_EPOCHS):
        losses.append([])
        start = time.perf_counter()
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["images"] / 16), batch["labels"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses[-1].append(loss.item())
        seconds.append(time.perf_counter() - start)
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return losses, weights, 1000 * median(seconds)


def _forge(path: Path, forged: Path, key: "Key", console: Console) -> None:
    from fastrack._keys.keyring import KeyRing
    from fastrack._sets.load_file import load_file
    from fastrack._transfer.api import to_device
    from fastrack.format import CHUNK_SIZE, HEADER_SIZE, chunk_offset

    data = bytearray(path.read_bytes())
    with load_file(path) as file:
        message = file["source"].message
        chunk = file["source"].nbytes // CHUNK_SIZE // 2
        offset = data.index(bytes(message[:HEADER_SIZE])) + chunk_offset(chunk)
    data[offset] ^= 1
    forged.write_bytes(data)
    with load_file(forged) as file:
        try:
            to_device(file["source"], keys=key)
        except AuthenticationError as error:
            console.print(f"refused: {error}")
        else:
            raise FastrackError("the forgery was accepted; please report this")
    console.print("\n`fastrack verify` shows which tensors were altered:\n")
    print_lines(verify_contents(forged, KeyRing(key), Meter("verifying")).lines)
