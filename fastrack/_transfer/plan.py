"""Plan a call: its tensors, the messages that they are made of, and the arrays that these fill."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NoReturn

from fastrack._crypto.base import GatherPlan, HostMemory
from fastrack._crypto.message_keys import MessageKeys
from fastrack._crypto.session import Session
from fastrack._devices.base import MAX_MESSAGES, Device, Messages
from fastrack._keys.keyring import KeyRing
from fastrack._sealed.fetching import Wanted, discard, fetch
from fastrack._sealed.headers import open_headers
from fastrack._sealed.indexing import EvenRanges, LazyRanges
from fastrack._sealed.tensor import SealedRows, SealedTensor, TensorSlice
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Framework
from fastrack._transfer.pending import Name
from fastrack._util.tree import Tree

FRESH: Final = object()
"""A leaf of `out` for which fresh memory is allocated."""


class Plan:
    """The tensors of a pytree, in its order, and their messages.

    With `in_memory_order` the dimensions of torch tensors are taken in the order of their memory. A tensor that cannot
    be moved, as one that is sparse, nested or of complex128, raises `TypeError`.

    All but the keys are lists, since thousands of objects would keep the garbage collector busy.

    Attributes
    ----------
    tensors : sealed tensors, handles on rows, and arrays
    nbytes : bytes of all tensors
    targets : views of the arrays that they fill, as soon as there are any
    padded : the numbers of tensors of which messages leave bytes that must be zeros, after `open_headers`
    ring : the keys of sealed tensors, if there are any of these
    keys : the keys of the messages, after `open_headers`
    parts : for each message, the sealed tensor that it is of, and None for an array
    """

    __slots__ = (
        "_dtypes",
        "_fetched",
        "_framework",
        "_frameworks",
        "_indices",
        "_is_given",
        "_of",
        "_restores",
        "_results",
        "_shapes",
        "_slices",
        "_tree",
        "is_sealed",
        "keys",
        "nbytes",
        "padded",
        "parts",
        "ring",
        "targets",
        "tensors",
    )  # fmt: skip

    keys: MessageKeys

    def __init__(self, tree: Tree, framework: Framework | None, *, in_memory_order: bool) -> None:
        arrays.require_installed(framework)
        self._tree = tree
        self._framework: Framework | None = framework
        self.ring: KeyRing | None = None
        self.is_sealed = False
        self.tensors: list[Any] = []
        self.nbytes = 0
        self._indices: list[int] = []  # of the leaves in the tree
        self._frameworks: list[Framework | None] = []  # of arrays
        self._dtypes: list[str] = []  # as safetensors has them, and so the shapes
        self._shapes: list[tuple[int, ...]] = []
        self._restores: dict[int, Callable[[Any], Any]] = {}  # give results the form of what they were made of
        self._results: list[Any] = []
        self.targets: list[Any] = []
        self._is_given = False  # whether there are arrays to fill
        self.padded: list[int] = []
        self.parts: list[SealedTensor | None] = []
        self._slices: dict[int, TensorSlice] = {}  # of messages of which rows are wanted
        self._fetched: list[SealedTensor | None] | None = None  # parts in storages where their bytes are present
        self._of: list[int] = []  # the tensor of each message
        for index, value in enumerate(tree.leaves):
            if isinstance(value, SealedTensor):
                context = value.context
                self._add(index, value, None, context.dtype, context.shape, value.nbytes)
                self.is_sealed = True
            elif isinstance(value, SealedRows):
                dtype, shape = value.dtype, value.shape
                self._add(index, value, None, dtype, shape, dtypes.nbytes(dtype, shape))
                self.is_sealed = True
            else:
                try:
                    self._add_array(index, value, in_memory_order=in_memory_order)
                except (TypeError, ValueError) as error:
                    self._add_path(error, index)
                    raise

    def view_outputs(self, device: Device, out: Any) -> None:
        """Take the arrays to fill, which must fit the tensors. `FRESH` stands for one that is still to be allocated."""
        outputs = self._tree.leaves_of(out)
        self._is_given = True
        for index, dtype, shape in zip(self._indices, self._dtypes, self._shapes, strict=True):
            out = outputs[index]
            target = None
            if out is FRESH:
                out = None
            else:
                try:
                    given = arrays.describe(out)
                    if given != (dtype, shape):
                        _refuse_unfit(given, (dtype, shape))
                    target = device.view(out, writable=True)
                except (TypeError, ValueError) as error:
                    self._add_path(error, index)
                    raise
            self.targets.append(target)
            self._results.append(out)

    def open_headers(self, session: Session) -> None:
        """Authenticate all headers, and derive the keys of all messages. Nothing is allocated or moved before.

        Of files on servers nothing but headers is downloaded.
        """
        plain = []
        parts, of = self.parts, self._of
        for number, value in enumerate(self.tensors):
            if isinstance(value, SealedTensor):
                parts.append(value)
                of.append(number)
            elif isinstance(value, SealedRows):
                assert self.ring is not None
                value.check_contexts(self.ring)
                if value.needs_padding:
                    self.padded.append(number)
                for part in value.slices():
                    self._slices[len(parts)] = part
                    parts.append(part.tensor)
                    of.append(number)
            else:
                plain.append(len(parts))
                parts.append(None)
                of.append(number)
        if len(parts) > MAX_MESSAGES:
            raise ValueError(f"moving tensors failed: expected {MAX_MESSAGES} at once or fewer; make several calls")
        self.keys = MessageKeys(len(parts))
        try:
            if self.ring is not None:
                open_headers(parts, self.ring, self.keys, cacheable=self._slices)
            if plain:
                session.next_keys(self.keys, plain)
        except BaseException:
            self.keys.wipe()
            raise

    def fetch(self) -> None:
        """Download what the call needs of files on servers. How much that is, is authentic by now."""
        self._fetched = fetch(self._wanted())

    def discard(self) -> bool:
        """Forget what was kept of files on servers, after a failure. Return False if nothing of these was used."""
        return self._fetched is not None and discard(self._wanted())

    def _wanted(self) -> Iterator[Wanted]:
        for number, part in enumerate(self.parts):
            yield part, self._slices[number].ranges if number in self._slices else None

    def allocate(self, device: Device) -> None:
        """Allocate the arrays that are not there. The sizes that headers claim are authentic by now."""
        if not self.targets:
            self.targets = [None] * len(self.tensors)
            self._results = [None] * len(self.tensors)
        columns = zip(self.targets, self._dtypes, self._shapes, self._frameworks, strict=True)
        for number, (target, dtype, shape, source) in enumerate(columns):
            if target is None:
                framework = device.framework(self._framework, source)
                self._results[number], self.targets[number] = device.empty(dtype, shape, framework)

    def messages(self) -> Messages:
        """Return the messages for a device."""
        nbytes: list[int] = []
        sealed: list[HostMemory | None] = []
        plain: list[HostMemory | None] = []
        sources: list[HostMemory] = []
        targets = list(map(self.targets.__getitem__, self._of))
        for part, number in zip(self._fetched or self.parts, self._of, strict=True):
            if part is None:
                try:
                    source = HostMemory.of(arrays.bytes_of(self.tensors[number]))
                except TypeError as error:
                    self._add_path(error, self._indices[number])
                    raise
                sealed.append(None)
                plain.append(source)
                nbytes.append(source.size)
            else:
                source = part.memory
                sealed.append(source)
                plain.append(None)
                nbytes.append(part.nbytes)
            sources.append(source)
        if self._is_given:
            self._require_apart(sources)
        plans: list[GatherPlan | None] = [None] * len(sources)
        for message, wanted in self._slices.items():
            ranges = wanted.ranges
            plans[message] = GatherPlan.of(ranges) if type(ranges) is EvenRanges else ranges().pieces()
        return Messages(self.keys, nbytes, targets, sealed, plain, plans)

    def results(self) -> Any:
        """Return the pytree with the arrays in place of the tensors."""
        leaves = self._tree.leaves
        for index, result in zip(self._indices, self._results, strict=True):
            leaves[index] = result
        if self._restores:
            for number, restore in self._restores.items():
                leaves[self._indices[number]] = restore(self._results[number])
        return self._tree.rebuild(leaves)

    @property
    def tensor_name(self) -> str | None:
        """The name of the sealed tensor, if there is nothing else."""
        return self.tensors[0].name if len(self.tensors) == 1 and self.is_sealed else None

    def name(self, message: int) -> Name:
        """Return the name and the path of the tensor that a message is of."""
        tensor = self.parts[message]
        return (None, None) if tensor is None else (tensor.name, tensor.path)

    def names(self) -> list[Name]:
        """Return the names and paths of all messages, which keep no tensor alive."""
        return [self.name(message) for message in range(len(self.parts))]

    def _add(
        self, index: int, value: Any, framework: Framework | None, dtype: str, shape: tuple[int, ...], nbytes: int
    ) -> None:
        self.nbytes += nbytes
        self._indices.append(index)
        self.tensors.append(value)
        self._frameworks.append(framework)
        self._dtypes.append(dtype)
        self._shapes.append(shape)

    def _add_array(self, index: int, value: Any, *, in_memory_order: bool) -> None:
        """Add an array of numbers, and nothing else."""
        framework = arrays.framework_of(value)
        if framework is None or (framework == "numpy" and not dtypes.holds_numbers(value.dtype)):
            return
        if in_memory_order and framework == "torch":
            value, restore = arrays.in_memory_order(value)
            if restore is not None:
                self._restores[len(self.tensors)] = restore
        dtype, shape = arrays.describe(value)
        self._add(index, value, framework, dtype, shape, value.nbytes)

    def _require_apart(self, sources: Sequence[HostMemory]) -> None:
        """Refuse an array to fill in memory of another one or of a source: messages are opened in any order."""
        if len(sources) == len(self.targets) == 1:
            source, target = sources[0], self.targets[0]
            if source.address >= target.address + target.size or target.address >= source.address + source.size:
                return
        spans = sorted(
            (target.address, target.address + target.size, number)
            for number, target in enumerate(self.targets)
            if target.size
        )
        starts = [start for start, _, _ in spans]
        shared = [
            (number, "another array to fill") for (_, stop, _), (start, _, number) in pairwise(spans) if start < stop
        ]
        for source in sources:
            last = bisect_left(starts, source.address + source.size) - 1  # that begins before the end of the source
            if source.size and last >= 0 and spans[last][1] > source.address:
                shared.append((spans[last][2], "a tensor that is moved"))
        if shared:
            number, owner = min(shared)
            error = ValueError(f"expected out= in memory of its own, got the memory of {owner}")
            self._add_path(error, self._indices[number])
            raise error

    def _add_path(self, error: Exception, index: int) -> None:
        """Add the path of a leaf in the pytree to an error."""
        path = self._tree.path(index)
        if path and len(error.args) == 1:
            error.args = (f"leaf {path}: {error}",)


def wanted_of(tree: Any) -> Iterator[tuple[SealedTensor, LazyRanges | None]]:
    """Yield the messages of a pytree, and what computes the bytes wanted of each; None for all."""
    for leaf in Tree(tree).leaves:
        if isinstance(leaf, SealedTensor):
            yield leaf, None
        elif isinstance(leaf, SealedRows):
            yield from leaf.slices()


def _refuse_unfit(given: tuple[str, tuple[int, ...]], expected: tuple[str, tuple[int, ...]]) -> NoReturn:
    raise ValueError(
        f"out= must have the dtype and shape of what it receives: expected {expected[0]} {list(expected[1])}, got "
        f"{given[0]} {list(given[1])}"
    )
