"""Writing of sealed and plain files: in one pass, with one slab in memory, under the final name once complete."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastrack._crypto import cobblestone
from fastrack._crypto.engine import get_engine
from fastrack._files.plain_tensor import PlainTensor
from fastrack._keys.keyring import KeyLike, KeyRing, sealing_key
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import Binding, Kind, MessageContext, new_file_id
from fastrack._sealed.file_header import ABOUT, encode_header
from fastrack._sealed.message_headers import authenticate_headers
from fastrack._sealed.metadata import encode_fields, entry_of
from fastrack._sealed.scales import Scale, scale_of
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._util import registry
from fastrack._util.atomic import OwnWriter, new_file
from fastrack._util.locations import Location, Url, locate, require_path
from fastrack._util.public import public
from fastrack._util.shown import shown
from fastrack._util.trial import Trial, current
from fastrack.errors import FormatError
from fastrack.format import CHUNK_SIZE, ciphertext_size, message_size

Progress = Callable[[int], None]
SealOnDevice = Callable[[MessageContext, Key], Bytes]
"""Return the message of a tensor, with this context and under this key."""
Entries = dict[str, tuple[str, tuple[int, ...]]]  # stored dtype and shape of each tensor

SLAB = 8 << 20  # bytes, so that ciphertext is still in the caches when it is written
_NOTHING = np.empty(0, np.uint8)


@public
def save_file(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    key: KeyLike | None = None,
    *,
    plain: Iterable[str] = (),
    scales: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Seal tensors into a new file.

    The file replaces an existing one when it is complete and on disk. A failure leaves the existing file unchanged.

    Parameters
    ----------
    tensors : mapping of str to numpy.ndarray, torch.Tensor or SealedTensor
        Tensors in host memory, whose values are stored in C order. A `SealedTensor` must have this name and key; it is
        bound to the file and stored without being decrypted, with its scales if it has some.
    path : path or URL
        The file to write; a ``.safetensors`` suffix is customary. A store such as ``s3://`` gets it in parts.
    key : KeyLike, optional
        The owner's key, as for `seal`.
    plain : iterable of str
        Names of tensors to store unencrypted and unauthenticated.
    scales : mapping of str to str, optional
        From names of quantised values to the names of their scales, both tensors of the file, as `seal` takes them.
    metadata : mapping of str to str, optional
        Metadata of the file. It is neither encrypted nor authenticated.
    progress : callable, optional
        Called with the number of plaintext bytes written since the previous call.

    Raises
    ------
    TypeError
        If a value is not a tensor in host memory, or its dtype has no safetensors name.
    ValueError
        If a tensor was sealed under another name or key, or as part of a checkpoint; or if scales do not fit, or are
        other ones than a sealed tensor has.
    AuthenticationError
        If the header of a sealed tensor was altered.
    OSError
        If the file cannot be written. No part of it is left behind then.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> tensors = {"images": np.zeros((10, 28, 28), np.uint8), "labels": np.arange(10)}
    >>> fastrack.save_file(tensors, "train.safetensors", key, plain=["labels"], metadata={"licence": "CC0"})
    >>> with fastrack.load_file("train.safetensors") as file:
    ...     print(file["images"].shape, file.plain["labels"][:3], file.metadata)
    (10, 28, 28) [0 1 2] {'licence': 'CC0'}
    """
    require_path(path, "save_file(tensors, path, key)")
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors: expected a mapping of names to tensors, got {type(tensors).__name__}. Name them")
    key, plain = sealing_key(key), plain_names(plain)
    described, sealed = {}, {}
    earlier = (tensor.scale for tensor in tensors.values() if isinstance(tensor, SealedTensor))
    tensors = {**{scale.name: scale for scale in earlier if scale is not None}, **tensors}
    for name, tensor in tensors.items():
        if isinstance(tensor, SealedRows):
            raise TypeError(f"{name!r:.200}: expected a tensor, got SealedRows. Store all of it, or unseal the rows")
        if isinstance(tensor, SealedTensor):
            _require_own(name, tensor, key, plain)
            sealed[name] = tensor
            described[name] = _describe_message(tensor)
            continue
        try:
            described[name] = PlainTensor.of(tensor)
        except TypeError as error:
            raise TypeError(f"{name!r:.80} cannot be saved: {error}") from error
    for tensor in sealed.values():
        scale = tensor.scale
        if scale is not None and (scale.name not in sealed or sealed[scale.name].context != scale.context):
            raise ValueError(
                f"{tensor.name!r:.200}: expected {scale.name!r:.200} to be the scales that it was sealed with, got "
                "others. Leave those out"
            )
    new = {name: tensor for name, tensor in described.items() if name not in sealed and name not in plain}
    pairs = describe_scales(new, scales or {})
    write_sealed(described, locate(path), key, plain, metadata or {}, progress, sealed=sealed, scales=pairs)


def describe_scales(
    tensors: Mapping[str, PlainTensor], scales: Mapping[str, str], block: tuple[int, int] | None = None
) -> dict[str, Scale]:
    """Return the scales of the tensors to seal, whose names are given by the names of the values."""
    for name in (*scales, *scales.values()):
        if name not in tensors or (name in scales and name in scales.values()):
            raise ValueError(f"scales=: expected values and scales to seal, got {shown(name, 200)}. Name other tensors")
    return {
        values: scale_of(
            tensors[values].dtype, tensors[values].shape, tensors[name].dtype, tensors[name].shape, name, block
        )
        for values, name in scales.items()
    }


def _describe_message(tensor: SealedTensor) -> PlainTensor:
    return PlainTensor("U8", (tensor.message_size,), lambda: tensor.read_message)


def _require_own(name: str, tensor: SealedTensor, key: Key, plain: frozenset[str]) -> None:
    """Refuse a sealed tensor of another key or name, or of a checkpoint, and authenticate its header."""
    if tensor.key_id != key.id:
        raise ValueError(
            f"{name!r:.200}: expected a tensor sealed under the key of the file, {key.id}, got one under "
            f"{tensor.key_id}. Give that key"
        )
    if tensor.name != name:
        raise ValueError(
            f"{name!r:.200}: expected a tensor sealed by this name, got {tensor.name!r:.200}, which is authenticated. "
            "Store it by that name"
        )
    if tensor.context.kind != "tensor":
        raise ValueError(f"{name!r:.200} is part of a {tensor.context.kind}, and of no other file. Unseal it first")
    if name in plain:
        raise ValueError(f"plain= names {name!r:.200}, which is sealed. Unseal it first")
    authenticate_headers([tensor], KeyRing(key))  # else its binding would vouch for an altered context


def plain_names(plain: Iterable[str]) -> frozenset[str]:
    """Return the names of a ``plain=`` argument."""
    if isinstance(plain, str):
        raise TypeError(f"plain=: expected an iterable of names, got one text. Give [{shown(plain, 200)}]")
    return frozenset(plain)


def write_sealed(
    tensors: Mapping[str, PlainTensor],
    target: Location | IO[bytes],
    key: Key,
    plain: frozenset[str],
    metadata: Mapping[str, str],
    progress: Progress | None,
    *,
    overwrite: bool = True,
    kind: Kind = "tensor",
    sealed: Mapping[str, SealedTensor] | None = None,
    in_order: bool = False,
    sealers: Mapping[str, SealOnDevice] | None = None,
    file_id: str | None = None,
    scales: Mapping[str, Scale] | None = None,
) -> None:
    """Write a new sealed file of these tensors, slab by slab. Messages in `sealed` are copied and bound to it.

    With `in_order`, which excludes plain tensors, tensors are read in the given order. Otherwise they are sorted.
    Functions in `sealers` seal tensors that are not in host memory. A `file_id` must be new. Quantised values are bound
    to their `scales`, which are among the tensors.
    """
    _check_texts(tensors, plain, metadata)
    if (trial := current()) is not None:
        trial.has_sealed = True
        tensors, sealed, sealers, scales = dict.fromkeys(tensors, PlainTensor.of(_NOTHING)), None, None, None
        target = _tried(target, trial)
    file_id = file_id or new_file_id()
    contexts = {
        name: MessageContext(name, tensor.dtype, tensor.shape, file_id, kind, (scales or {}).get(name))
        for name, tensor in tensors.items()
        if name not in plain and name not in (sealed or {})
    }
    entries = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    entries |= {name: ("U8", (message_size(tensors[name].nbytes),)) for name in contexts}
    if not in_order:
        entries = by_alignment(entries)
    elif plain:
        raise ValueError("expected no plain tensors in order, as each has to be aligned. Seal a file")
    sealed_entries: dict[str, Any] = {name: entry_of(context) for name, context in contexts.items()}
    for name, tensor in (sealed or {}).items():
        binding = Binding.new(tensor.context, file_id, key)
        context = tensor.context
        sealed_entries[name] = {**entry_of(context), "file": context.file, "binding": binding.header.hex()}
    fields = encode_fields(file_id, key.id, sealed_entries, kind)
    sealers = sealers or {}
    largest = max((tensors[name].nbytes for name in contexts if name not in sealers), default=0)
    # One buffer for all messages: fresh memory costs more than AES.
    memory = arrays.empty_bytes(ciphertext_size(min(SLAB, largest)))
    is_open = not sealed_entries or kind == "index" or ABOUT in tensors  # any reader may count and copy a dataset
    header = encode_header(entries, {**metadata, **fields}, guarded=not is_open)
    size = len(header) + sum(dtypes.nbytes(*entry) for entry in entries.values())
    with open_target(target, size, overwrite=overwrite) as out:
        out.write(header)
        for name in entries:
            if name in sealers:
                write_data(out, sealers[name](contexts[name], key), tensors[name].nbytes, progress)
            elif name in contexts:
                _write_message(tensors[name], contexts[name], key, memory, out, progress)
            else:
                write_plain(tensors[name], out, progress)


def _check_texts(tensors: Mapping[str, PlainTensor], plain: frozenset[str], metadata: Mapping[str, str]) -> None:
    texts: list[object] = [*tensors, *metadata, *metadata.values()]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"names and metadata: expected text, got {shown(text)}; safetensors holds nothing else")
    unknown = plain - tensors.keys()
    if unknown:
        raise KeyError(f"plain= names tensors that are not given: {', '.join(sorted(unknown)):.200}")
    marked = sorted(name for name in metadata if name.startswith("fastrack."))
    if marked:
        raise FormatError(f"metadata: keys that begin with 'fastrack.' are reserved, got {', '.join(marked):.200}")


def _tried(target: Location | IO[bytes], trial: Trial) -> Location | IO[bytes]:
    """Return where a file of a trial goes: nowhere, in the place of a file or an object outside of its folder."""
    if isinstance(target, Url):
        return io.BytesIO()
    if not isinstance(target, Path) or trial.holds(target):
        return target
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
    return io.BytesIO()


def open_target(target: Location | IO[bytes], size: int, *, overwrite: bool) -> AbstractContextManager[IO[bytes]]:
    """Open a file of ciphertext for writing, on this machine or on a server. An open file stays open."""
    if isinstance(target, Url):
        begun: AbstractContextManager[IO[bytes]] = registry.find(registry.REMOTE["new"])(
            target, size, overwrite=overwrite
        )
        return begun
    if isinstance(target, Path):
        return new_file(target, size, overwrite=overwrite)
    return nullcontext(OwnWriter(target))  # type: ignore[arg-type]


def _write_message(
    tensor: PlainTensor, context: MessageContext, key: Key, memory: Bytes, out: IO[bytes], progress: Progress | None
) -> None:
    engine = get_engine()
    message_key, header = context.new_key(key)
    schedule = engine.expand_key(message_key)
    message_key.wipe()
    done = 0

    def seal(slab: Bytes) -> None:
        """Seal the next bytes. Their chunks are numbered here, so that no two have one nonce, whatever brings them."""
        nonlocal done
        first = done // CHUNK_SIZE
        sealed = memory[: cobblestone.segment_size(first, slab.size, tensor.nbytes)]
        engine.seal_run(schedule, slab, sealed, first)
        done += slab.size
        write_data(out, sealed, slab.size, progress)

    try:
        out.write(header.data)
        if tensor.push is not None:
            tensor.push(seal)
            return
        read = tensor.load()
        for first, size in cobblestone.iter_segments(tensor.nbytes, SLAB):
            start = first * CHUNK_SIZE
            seal(read(start, start + size))
    finally:
        schedule.wipe()


def write_plain(tensor: PlainTensor, out: IO[bytes], progress: Progress | None) -> None:
    """Write a tensor that stays unencrypted."""
    read = tensor.load()
    for start in range(0, tensor.nbytes, SLAB):
        piece = read(start, min(start + SLAB, tensor.nbytes))
        write_data(out, piece, piece.size, progress)


def write_data(out: IO[bytes], data: Bytes, size: int, progress: Progress | None) -> None:
    """Write bytes of a message or of its plaintext, and report the number of bytes of plaintext."""
    out.write(data.data)
    if progress is not None:
        progress(size)


def by_alignment(entries: Entries) -> Entries:
    """Sort entries by element size, widest first, so that each tensor is aligned to its element size."""
    return dict(sorted(entries.items(), key=lambda entry: (-dtypes.BITS[entry[1][0]], entry[0])))
