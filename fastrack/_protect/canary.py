"""The canary: random numbers go through every writer once and must be in no file, before anything secret does."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastrack.errors import FastrackError

_NEEDLE = 64  # bytes
_FOUND = 16  # bytes of the needle in a row that show that it is there


@contextlib.contextmanager
def naming_what_is_missing() -> Iterator[None]:
    """Turn the error of a function that was to be replaced, and is not there, into one that says so."""
    try:
        yield
    except (AttributeError, KeyError) as error:
        name = getattr(error, "name", None) or error
        raise FastrackError(
            f"protect_checkpoints: expected the function {name!s:.80} of a covered torch or safetensors, got "
            "none; it was moved or replaced. Protect before other libraries change torch, or install other versions"
        ) from error


def import_all() -> None:
    """Import what is tried, before it is replaced: a module copies functions when it is imported."""
    for name in ("safetensors.numpy", "safetensors.torch", "torch.distributed.checkpoint"):
        importlib.import_module(name)


def sing() -> None:
    """Write random numbers by each door and read them by it. Refuse if one is unencrypted, or comes back otherwise."""
    with tempfile.TemporaryDirectory(prefix="fastrack-canary-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        for name, try_it in _TRIALS.items():
            needle = secrets.token_bytes(_NEEDLE)
            try:
                written = try_it(needle, Path(folder, name))
            except Exception as error:
                raise _refusal(name, f"got a {type(error).__name__}") from error
            parts = needle[:_FOUND], needle[-_FOUND:]
            if not written or any(part in content for content in written for part in parts):
                raise _refusal(name, "found it unencrypted")


def _refusal(name: str, what: str) -> FastrackError:
    return FastrackError(
        f"protect_checkpoints: {name}: expected a sealed file that comes back equal, {what}. This version of the "
        "library, or what has replaced its functions, is not covered. Install another, or protect earlier"
    )


def _torch_file(needle: bytes, path: Path, **options: Any) -> list[bytes]:
    import torch

    torch.save({"x": _tensor(needle)}, path, **options)
    if not options:
        _require_equal(torch._C.PyTorchFileReader(str(path)).get_record("data/0"), needle)
    for weights_only, mmap in ((True, False), (False, False), (True, not options)):
        _require_equal(torch.load(path, weights_only=weights_only, mmap=mmap)["x"], needle)
    return [path.read_bytes()]


def _torch_buffer(needle: bytes, path: Path) -> list[bytes]:
    import torch

    with path.open("w+b") as file:
        torch.save(_tensor(needle), file)
        file.seek(0)
        _require_equal(torch.load(file), needle)
        file.seek(0)
        _require_equal(torch._C.PyTorchFileReader(file).get_record("data/0"), needle)
    buffer = io.BytesIO()
    torch.save(_tensor(needle), buffer)
    buffer.seek(0)
    _require_equal(torch.load(buffer), needle)
    return [buffer.getvalue(), path.read_bytes()]


def _pickled(needle: bytes, _: Path) -> list[bytes]:
    tensor = _tensor(needle)
    contents = [pickle.dumps(each) for each in (tensor, tensor.untyped_storage())]
    _require_equal(pickle.loads(contents[0]), needle)  # noqa: S301 - made above; torch cannot load the other itself
    return contents


def _safetensors(needle: bytes, path: Path, framework: str) -> list[bytes]:
    library: Any = importlib.import_module(f"safetensors.{framework}")
    array = _tensor(needle) if framework == "torch" else _tensor(needle).numpy()
    library.save_file({"x": array}, path)
    _require_equal(library.load_file(path)["x"], needle)
    with library.safe_open(path, framework) as file:
        for opened in (file.get_tensor("x"), file.get_slice("x")[:]):
            _require_equal(opened, needle)
    content = library.save({"x": array})
    _require_equal(library.load(content)["x"], needle)
    return [content, path.read_bytes()]


def _distributed(needle: bytes, path: Path) -> list[bytes]:
    import torch
    import torch.distributed.checkpoint

    library: Any = torch.distributed.checkpoint
    library.save({"x": _tensor(needle), "y": needle}, checkpoint_id=path, no_dist=True)
    library.save({"x": _tensor(needle)}, storage_writer=library.FileSystemWriter(path / "w"), no_dist=True)
    states: list[Any] = [{"x": torch.zeros(_NEEDLE, dtype=torch.uint8), **more} for more in ({"y": b""}, {})]
    library.load(states[0], storage_reader=library.FileSystemReader(path), no_dist=True)
    library.load(states[1], checkpoint_id=path / "w", no_dist=True)
    for opened in (states[0]["x"], states[0]["y"], states[1]["x"]):
        _require_equal(opened, needle)
    return [each.read_bytes() for each in path.rglob("*") if each.is_file()]


def _tensor(needle: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(needle), dtype=torch.uint8)


def _require_equal(opened: Any, needle: bytes) -> None:
    if bytes(opened if isinstance(opened, bytes) else opened.tolist()) != needle:
        raise ValueError


_TRIALS: dict[str, Callable[[bytes, Path], list[bytes]]] = {
    "torch.save": _torch_file,
    "torch.save (its format before 1.6)": functools.partial(_torch_file, _use_new_zipfile_serialization=False),
    "torch.save (open files)": _torch_buffer,
    "pickle": _pickled,
    "safetensors.torch": functools.partial(_safetensors, framework="torch"),
    "safetensors.numpy": functools.partial(_safetensors, framework="numpy"),
    "torch.distributed.checkpoint": _distributed,
}
