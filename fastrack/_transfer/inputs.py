"""Prepare the tensors of a call: `Inputs` lists them, `Opened` authenticates headers and allocates the results."""

from __future__ import annotations

from bisect import bisect_left
from collections import UserList, deque
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from fastrack._crypto.base import HostMemory, Messages, Scaling
from fastrack._crypto.gather import EvenRanges, GatherPlan, LazyRanges
from fastrack._crypto.message_keys import MessageKeys
from fastrack._crypto.session import Session
from fastrack._devices.base import MAX_MESSAGES, Device
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sealed.handle import Handle
from fastrack._sealed.message_headers import Wanted, discard, fetch, open_headers
from fastrack._sealed.scales import WIDENED, grid
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Framework
from fastrack._transfer.pending import Name
from fastrack._util.tree import Tree

_CONTAINERS = set, frozenset, deque, UserList, SimpleNamespace, ValuesView, ItemsView  # which are leaves
_SINGLE = {bool, int, float, complex, str, bytes, type(None)}  # classes of leaves that hold nothing
_AS_ARRAY = "__array__", "__array_interface__", "__dataframe__", "__arrow_c_stream__"  # of tables and images
_MAKE = "Make a tensor of it, such as by torch.as_tensor or numpy.asarray"
_LEVELS = 16  # of such containers in one another that are looked through: some hold themselves
ALLOCATE: Final = object()
"""A leaf of `out` for which fresh memory is allocated."""


class Inputs:
    """The tensors of a pytree, in its order, and the arrays of `out` to fill, if any.

    With a `wanted` dtype each result has it: quantised values are widened, and other tensors must have it already.

    Without `out`, the dimensions of plain arrays are put in memory order. A tensor that cannot be moved (sparse,
    nested, complex128 or of another framework) raises `TypeError`, and so does a pytree of other things without one; an
    array of `out` that does not fit raises `ValueError`.

    Each attribute of the tensors is a list: thousands of objects would keep the garbage collector busy.
    """

    def __init__(
        self, obj: Any, framework: Framework | None, device: Device, out: Any, wanted: str | None = None
    ) -> None:
        if framework == "torch":
            arrays.require_installed(framework)
        self._tree = None if isinstance(obj, Handle) else Tree(obj)
        self._indices: list[int] = []  # of the leaves in the tree
        self._restores: dict[int, Callable[[Any], Any]] = {}  # give results the form of their inputs
        self.tensors: list[Any] = []  # sealed tensors, handles on rows, and arrays
        self.is_filling = out is not None
        self.dtypes: list[str] = []  # of the results, in safetensors notation
        self.shapes: list[tuple[int, ...]] = []
        self.framework: Framework | None = framework  # requested for all results
        self.frameworks: list[Framework | None] = []  # of each array; None if sealed
        name = None
        leaves = [obj] if self._tree is None else self._tree.leaves
        for index, value in enumerate(leaves):
            source: Framework | None = None  # stays None for a sealed tensor
            if isinstance(value, SealedTensor):
                name, dtype, shape = value.context[:3]
            elif isinstance(value, SealedRows):
                name, dtype, shape = value.name, value._dtype, value.shape  # noqa: SLF001 - the text, which compares faster
            else:
                source = arrays.framework_of(value)
                if source is None or (source == "numpy" and not dtypes.holds_numbers(value.dtype)):
                    self._require_no_handles(value, index)
                    continue
                try:
                    if out is None and (source == "torch" or (source == "numpy" and not value.flags.c_contiguous)):
                        value, restore = arrays.take_form(value)  # noqa: PLW2901 - the same array
                        if restore is not None:
                            self._restores[len(self.tensors)] = restore
                    dtype, shape = arrays.dtype_and_shape(value)
                except (TypeError, ValueError) as error:
                    self.add_path(error, index)
                    raise
            self._indices.append(index)
            self.tensors.append(value)
            self.dtypes.append(dtype)
            self.shapes.append(shape)
            self.frameworks.append(source)
        _require_none(() if self.tensors or (leaves and leaves[0] is obj and type(obj) in _SINGLE) else leaves)
        self.name = name if len(self.tensors) == 1 else None  # of the sealed tensor, if it is the only tensor
        self.scales: dict[int, SealedTensor] = {}  # of the quantised values to widen, by the number of the tensor
        self.targets: list[Any] = [None] * len(self.tensors)  # views of the arrays to fill; None to allocate one
        self.outputs = self.targets.copy()  # these arrays
        if out is not None or wanted is not None:
            self._take(device, out, wanted)

    def _require_no_handles(self, leaf: object, index: int) -> None:
        """Refuse a leaf whose sealed tensors would come back sealed, and one that gives its items only once."""
        cls = type(leaf)
        if cls in _SINGLE:
            return
        expected, got = "sealed tensors in dicts, lists and tuples", None
        if hasattr(cls, "__dlpack__") and not isinstance(leaf, np.ndarray):
            expected, got = "an array of NumPy, torch or CuPy", f"{cls.__name__}. {_MAKE}"
        elif hasattr(cls, "__next__") and cls.__module__ in {"builtins", "itertools"}:
            got = f"a {cls.__name__}, which may give some. Make it a list"
        elif isinstance(leaf, _CONTAINERS) and _holds_handles(leaf, _LEVELS):
            got = f"a {cls.__name__} of them. Make it a {'dict' if isinstance(leaf, SimpleNamespace) else 'list'}"
        if got is not None:
            error = TypeError(f"expected {expected}, got {got}")
            self.add_path(error, index)
            raise error

    def _take(self, device: Device, out: Any, wanted: str | None) -> None:
        """Take the dtype that is wanted of all results, then the arrays to fill."""
        if wanted is not None:
            self._widen(wanted)
        if out is not None:
            self._view_outputs(device, [out] if self._tree is None else self._tree.leaves_of(out))

    def _widen(self, wanted: str) -> None:
        for number, (value, dtype) in enumerate(zip(self.tensors, self.dtypes, strict=True)):
            if dtype == wanted:
                continue
            scale = value.scale if isinstance(value, SealedTensor) else None
            if wanted != WIDENED or scale is None:
                advice = "Open it without dtype=, and convert it then"
                if wanted == WIDENED and isinstance(value, SealedRows):
                    advice = "Open the whole tensor, if it is of quantised values; else leave dtype= out"
                error = ValueError(
                    f"dtype=: expected a tensor of {wanted}, or all of quantised values for {WIDENED}, got {dtype} "
                    f"{list(self.shapes[number])}. {advice}"
                )
                self.add_path(error, self._indices[number])
                raise error
            self.scales[number], self.dtypes[number] = scale, wanted

    def _view_outputs(self, device: Device, leaves: Sequence[Any]) -> None:
        for number, (index, dtype, shape) in enumerate(zip(self._indices, self.dtypes, self.shapes, strict=True)):
            if leaves[index] is ALLOCATE:
                continue
            try:
                self.targets[number] = view_output(device, leaves[index], dtype, shape)
            except (TypeError, ValueError) as error:
                self.add_path(error, index)
                raise
            self.outputs[number] = leaves[index]

    def results(self, outputs: Sequence[Any]) -> Any:
        """Return the pytree with `outputs` in place of the tensors."""
        if self._tree is None:
            return outputs[0]
        leaves = self._tree.leaves.copy()
        for index, output in zip(self._indices, outputs, strict=True):
            leaves[index] = output
        for number, restore in self._restores.items():
            leaves[self._indices[number]] = restore(outputs[number])
        return self._tree.rebuild(leaves)

    def source(self, number: int) -> HostMemory:
        """Return the memory of an array in host memory."""
        try:
            return HostMemory.of(arrays.bytes_of(self.tensors[number]))
        except TypeError as error:
            self.add_path(error, self._indices[number])
            raise

    def require_apart(self, targets: Sequence[Any], sources: Sequence[HostMemory]) -> None:
        """Refuse an output that shares memory with another output or a source: messages open in any order."""
        if len(sources) == len(targets) == 1 and are_apart(sources[0], targets[0]):
            return
        spans = sorted(
            (target.address, target.address + target.size, number)
            for number, target in enumerate(targets)
            if target.size
        )
        starts = [start for start, _, _ in spans]
        shared = [
            (number, "another array to fill") for (_, stop, _), (start, _, number) in pairwise(spans) if start < stop
        ]
        for source in sources:
            last = bisect_left(starts, source.address + source.size) - 1  # the last span before the end of the source
            if source.size and last >= 0 and spans[last][1] > source.address:
                shared.append((spans[last][2], "a tensor that is moved"))
        if shared:
            number, owner = min(shared)
            error = ValueError(f"expected out= in memory of its own, got the memory of {owner}")
            self.add_path(error, self._indices[number])
            raise error

    def add_path(self, error: Exception, index: int) -> None:
        """Add the path of a leaf in the pytree to an error."""
        path = "" if self._tree is None else self._tree.path(index)
        if path and len(error.args) == 1:
            error.args = (f"leaf {path}: {error}",)


def view_output(device: Device, array: Any, dtype: str, shape: Sequence[int]) -> Any:
    """Return the view of an array of `out`. Raise `ValueError` if it does not fit what it receives."""
    actual = arrays.dtype_and_shape(array)
    if actual != (dtype, shape):
        raise ValueError(
            f"out= must have the dtype and shape of what it receives: expected {dtype} {list(shape)}, got "
            f"{actual[0]} {list(actual[1])}"
        )
    return device.view(array, writable=True)


def are_apart(a: HostMemory, b: HostMemory) -> bool:
    """Return whether two ranges of host memory have no byte in common."""
    return a.address >= b.address + b.size or b.address >= a.address + a.size


def _require_none(leaves: Sequence[Any]) -> None:
    """Refuse the leaves of a pytree without a tensor if one could be made: callers may think that they were moved."""
    for leaf in leaves:
        is_data = isinstance(leaf, complex | float | int) or any(hasattr(type(leaf), name) for name in _AS_ARRAY)
        if is_data and not isinstance(leaf, np.ndarray):  # which is one of text, or of objects
            raise TypeError(f"expected a tensor or more, got none, but {type(leaf).__name__}. {_MAKE}")


def _holds_handles(value: object, levels: int) -> bool:
    if isinstance(value, Handle):
        return True
    if type(value) in _SINGLE or not levels:
        return False
    parts: Any = ()
    if isinstance(value, SimpleNamespace):
        parts = vars(value).values()
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple, *_CONTAINERS)):
        parts = value
    return any(_holds_handles(each, levels - 1) for each in parts)


def _rings_of(tensors: Sequence[Any], keys: KeySource | None) -> list[KeyRing | None]:
    """Return the ring of each sealed tensor: of the call, else of its dataset, else the default."""
    if keys is not None:
        return [KeyRing.resolve(keys)] * len(tensors)
    rings: list[KeyRing | None] = [None] * len(tensors)
    shared: KeyRing | None = None
    for number, each in enumerate(tensors):
        if isinstance(each, Handle):
            own = each._own_keys  # noqa: SLF001 - of this package
            shared = KeyRing.resolve(None) if own is None and shared is None else shared
            rings[number] = shared if own is None else own
    return rings


class Opened:
    """The messages of a call, whose headers are authentic."""

    __slots__ = ("_is_remote", "_of", "_ranges", "_was_fetched", "inputs", "keys", "padded", "parts")

    def __init__(self, inputs: Inputs, keys: KeySource | None, session: Session) -> None:
        """Authenticate all headers, and derive the keys of all messages. Nothing is allocated or moved before.

        Only the headers of remote files are downloaded.
        """
        rings: list[KeyRing | None] = [None] * len(inputs.tensors)
        rings = _rings_of(inputs.tensors, keys) if None in inputs.frameworks else rings
        self.inputs = inputs
        self.padded: list[int] = []  # the numbers of tensors with padding, which must be zeros
        self._of: list[int] = []  # the tensor of each message. Those of scales are counted after the others
        self._ranges: dict[int, LazyRanges] = {}  # of messages that are read in part
        parts: list[SealedTensor | None] = []
        plain: list[int] = []
        scaled: list[int] = []
        for number, (value, ring) in enumerate(zip(inputs.tensors, rings, strict=True)):
            if isinstance(value, SealedRows):
                assert ring is not None
                if value.needs_padding:
                    self.padded.append(number)
                for tensor, ranges in value.select(ring):
                    self._ranges[len(parts)] = ranges
                    parts.append(tensor)
                    self._of.append(number)
                continue
            is_sealed = isinstance(value, SealedTensor)
            if number in inputs.scales:
                parts.append(inputs.scales[number])
                self._of.append(len(inputs.tensors) + len(scaled))
                scaled.append(number)
            plain += [] if is_sealed else [len(parts)]
            parts.append(value if is_sealed else None)
            self._of.append(number)
        if len(parts) > MAX_MESSAGES:
            raise ValueError(f"moving tensors failed: expected {MAX_MESSAGES} at once or fewer; make several calls")
        self.parts = parts  # the sealed tensor of each message; None for an array
        self._is_remote = self._was_fetched = False
        self.keys = MessageKeys(len(parts))  # which the caller wipes
        try:
            if len(parts) > len(plain):
                self._open_headers(rings, scaled)
            if plain:
                session.next_keys(self.keys, plain)
        except BaseException:
            self.keys.wipe()
            raise

    def _open_headers(self, rings: list[KeyRing | None], scaled: Sequence[int]) -> None:
        if scaled:
            rings += [rings[number] for number in scaled]
        several = dict.fromkeys(rings)
        for ring in several:
            if ring is None:  # of plain arrays
                continue
            own = self.parts
            if len(several) > 1:
                own = [each if rings[number] is ring else None for each, number in zip(own, self._of, strict=True)]
            self._is_remote |= open_headers(own, ring, self.keys, cacheable=self._ranges)

    def discard(self) -> bool:
        """Discard the cached bytes of remote files after a failure. Return False if none were used."""
        return self._was_fetched and discard(self._wanted())

    def _wanted(self) -> Iterator[Wanted]:
        for number, part in enumerate(self.parts):
            yield part, self._ranges.get(number)

    def allocate(self, device: Device) -> tuple[Messages, list[Any], list[Any], int]:
        """Allocate the missing arrays, whose sizes were authenticated with the headers.

        Return the messages, the arrays, the views of the arrays and then of scales, and the size of all arrays in
        bytes. The required parts of remote files are downloaded first.
        """
        inputs = self.inputs
        present = fetch(self._wanted()) if self._is_remote else None
        self._was_fetched = present is not None
        targets, outputs, total = inputs.targets.copy(), inputs.outputs.copy(), 0
        frameworks: dict[Framework | None, Framework] = {}  # of results, by the frameworks of inputs
        columns = zip(inputs.dtypes, inputs.shapes, inputs.frameworks, strict=True)
        for number, (dtype, shape, framework) in enumerate(columns):
            if targets[number] is None:
                if framework not in frameworks:
                    frameworks[framework] = device.framework(inputs.framework, framework)
                outputs[number], targets[number] = device.empty(dtype, shape, frameworks[framework])
            total += targets[number].size
        for scale in inputs.scales.values():  # as bytes, which every framework has
            targets.append(device.empty("U8", (scale.nbytes,), device.framework(inputs.framework, None))[1])
        nbytes: list[int] = []
        sealed: list[HostMemory | None] = []
        plain: list[HostMemory | None] = []
        sources: list[HostMemory] = []
        for part, number in zip(present or self.parts, self._of, strict=True):
            if part is None:
                source = inputs.source(number)
                sealed.append(None)
                plain.append(source)
                nbytes.append(source.size)
            else:
                source = part.memory
                sealed.append(source)
                plain.append(None)
                nbytes.append(part.nbytes)
            sources.append(source)
        plans: list[GatherPlan | None] = [None] * len(sources)
        for message, ranges in self._ranges.items():
            plans[message] = GatherPlan.of(ranges) if type(ranges) is EvenRanges else ranges().pieces()
        if inputs.is_filling:
            inputs.require_apart(targets, sources)
        memories = list(map(targets.__getitem__, self._of))
        scalings = self._scalings(memories) if inputs.scales else [None] * len(memories)
        return Messages(self.keys, nbytes, memories, sealed, plain, plans, scalings), outputs, targets, total

    def _scalings(self, memories: Sequence[Any]) -> list[Scaling | None]:
        scalings: list[Scaling | None] = [None] * len(memories)
        for message, number in enumerate(self._of):
            part = self.parts[message]
            if part is not None and number in self.inputs.scales:
                found = part.context.scale
                assert found is not None
                memory, columns = memories[message - 1], grid(part.shape)[1]  # the scales come right before
                scalings[message] = Scaling(memory, found.dtype, part.context.dtype, columns, *found.block)
        return scalings

    def name(self, message: int) -> Name:
        """Return the name and the path of the tensor of a message; (None, None) for an array."""
        tensor = self.parts[message]
        return (None, None) if tensor is None else (tensor.name, tensor.path)
