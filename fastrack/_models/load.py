"""`load_model` and `save_model`: sealed weights of a torch module."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastrack._devices import canonical, confidential
from fastrack._files.reader import SealedFile
from fastrack._files.writer import Progress, save_file
from fastrack._keys.keyring import KeyLike, KeyRing, KeySource
from fastrack._models.mapped_pages import give_back, in_parts, is_small, open_in_pieces, takes_pieces
from fastrack._models.progress import reported
from fastrack._models.safe_open import require_tensors
from fastrack._models.sharded import save_gathered, select_box
from fastrack._sealed.messages import OpenMessage
from fastrack._sealed.scales import WIDENED
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._sets.folder import SealedFolder, merge_tensors, open_folder
from fastrack._sets.load_file import load_file, resolve_anchor
from fastrack._tensors import dtypes
from fastrack._tensors.arrays import installed
from fastrack._tensors.sharded import is_sharded, local_box, local_part, sharding_problem
from fastrack._tensors.storages import storage_key
from fastrack._transfer.api import group, to_device
from fastrack._transfer.inputs import ALLOCATE
from fastrack._util import extras
from fastrack._util.locations import locate, several
from fastrack._util.public import public
from fastrack.errors import AuthenticationError, FormatError

if TYPE_CHECKING or installed("torch"):
    import torch
if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor

_Owners = Sequence[tuple[Any, str]]  # the modules and attributes that hold a tensor


@public
def load_model(
    module: torch.nn.Module,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | SealedFolder,
    keys: KeySource | None = None,
    *,
    device: object = None,
    strict: bool = True,
    anchor: Anchor | str | os.PathLike[str] | None = None,
    progress: Progress | bool | None = None,
    require: str | None = None,
) -> Any:
    """Load sealed weights into the parameters and buffers of a torch module, on their devices.

    A tensor is authenticated and decrypted in the parameter's own memory. If its dtype differs, or the parameter is not
    contiguous, a temporary tensor on that device is used. Quantised values are multiplied by their scales and
    widened to bfloat16, unless the parameter has their dtype, or the module one of the name of their scales.

    Of DTensors, for example in a module sharded by ``fully_shard``, each process opens only the chunks of its part.
    DTensors on the meta device become shards. Processes do not wait for each other.

    Parameters
    ----------
    module : torch.nn.Module
        Module whose parameters and persistent buffers are filled, by their names in its ``state_dict``. Of tensors
        that share their memory, one in the file suffices. The hooks of ``load_state_dict`` are not run. Buffers that
        are not persistent are in no file; if they are on the meta device they stay there, and a warning names them.
    path : path, sequence of paths or SealedFolder
        Sealed file, from `save_model` or with such names; or a folder from `seal_folder`, by its path or opened by
        `load_folder`, whose weights are loaded (`SealedFolder.weights`); or several files, which together have each
        name once. The files of a folder are bound together, but files of a sequence only by an anchor.
    keys : KeySource, optional
        As for `to_device`.
    device : str or torch.device, optional
        Device for parameters on torch's meta device, which get the dtype of the file and become contiguous: "cpu", the
        default, or "cuda:N". Other parameters stay on their device, with their strides. For DTensors the default is the
        device of their mesh.
    strict : bool
        Require equal names in the file and in the module, and equal tensors where the file has several for one memory
        of the module, to the last bit in the dtype that it has there. If False, the last of these is kept, in the
        order of ``state_dict``, as by ``load_state_dict``.
    anchor : Anchor or path, optional
        As for `load_file` and `load_folder`.
    progress : callable or bool, optional
        As for `load_tensors`.
    require : {"confidential"}, optional
        Refuse tensors on any device but a GPU in confidential mode, as for `fastrack.Channel`.

    Returns
    -------
    named tuple of missing_keys and unexpected_keys
        As from ``load_state_dict``. Unencrypted tensors of the file are left out.

    Raises
    ------
    TypeError
        If a tensor to fill is a subclass with storage of its own other than DTensor, as in a quantised module.
    RuntimeError
        If a shape or dtype does not match, as from ``load_state_dict``, or if what `strict` requires does not hold.
    AuthenticationError
        If a name of the module is in the file unencrypted only, or a header, the key or a chunk does not match.
    UnknownKeyError
        If the file's key is not among `keys`.
    FormatError, RollbackError, SignatureError, OSError
        As from `load_file` and `load_folder`; also if two files share the name of a tensor.
    DeviceError
        If a device cannot be used, is not what is required, or fails.

    Notes
    -----
    Only an altered chunk or a failing device can raise after loading has begun. All parameters loaded until then are
    set to zero, because a partly loaded model is unusable. To keep the old weights then, use `reloadable`.

    Examples
    --------
    >>> import fastrack
    >>> import torch
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_model(torch.nn.Linear(3, 2), "model.safetensors", key=key)
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(3, 2)
    >>> fastrack.load_model(model, "model.safetensors", keys=key, device="cpu")
    <All keys matched successfully>
    >>> model.weight.shape, model.weight.device
    (torch.Size([2, 3]), device(type='cpu'))
    """
    extras.require("torch", "load_model", "torch")
    from torch.nn.modules.module import _IncompatibleKeys

    require_module(module, "load_model(module, path, keys)")
    ring = KeyRing.resolve(keys)
    steps, missing, unexpected, unlisted = plan_load(module, path, ring, device, anchor, strict=strict)
    for place in {step.device for step in steps}:
        confidential.check(place, require)
    fill(steps, ring, progress)
    if unlisted and (left := _left_on_meta(module)):
        warnings.warn(
            f"load_model: no file has buffers that are not persistent, and these are on the meta device still: "
            f"{', '.join(left):.400}. Make them again before you call the module",
            stacklevel=3,  # above what explains arguments
        )
    return _IncompatibleKeys(missing, unexpected)


@public
def save_model(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    key: KeyLike | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Seal the parameters and persistent buffers of a torch module into a new file.

    It is written slab by slab, without a second copy of the model, and replaces an existing file when it is complete
    and on disk. Of tensors that share their memory, one is stored, under the first of their names.

    A module with DTensors, for example one sharded by ``fully_shard``, is saved by all processes together: each calls
    this with its shards, whole tensors are gathered one at a time, and the process of rank 0 writes the file. To save
    separate shards, use `fastrack.distributed`.

    Parameters
    ----------
    module : torch.nn.Module
        Module in host memory.
    path : path
        The file to write; a ``.safetensors`` suffix is customary.
    key : KeyLike, optional
        The owner's key, as `seal` takes it.
    metadata : mapping of str to str, optional
        Metadata of the file. It is neither encrypted nor authenticated.

    Raises
    ------
    TypeError
        If a value of the module's state is not a dense tensor in host memory, or its dtype has no safetensors name.
    OSError
        If the file cannot be written. An existing file stays then, and no part of the new one is left behind.
    RuntimeError
        If the process of rank 0 could not write the file, in the other processes.

    Examples
    --------
    >>> import fastrack
    >>> import torch
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_model(torch.nn.Linear(3, 2), "model.safetensors", key=key)
    >>> with fastrack.load_file("model.safetensors") as file:
    ...     print({name: file[name].shape for name in sorted(file)})
    {'bias': (2,), 'weight': (2, 3)}
    """
    extras.require("torch", "save_model", "torch")
    require_module(module, "save_model(module, path, key)")
    tensors: dict[Hashable, tuple[str, Any]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        _require_saveable(name, value)
        tensors.setdefault(storage_key(value), (name, value))
    save = save_gathered if any(is_sharded(value) for _, value in tensors.values()) else save_file
    save(dict(tensors.values()), path, key, metadata=metadata)


def require_module(module: object, usage: str) -> None:
    """Refuse anything but a torch module, for example if arguments are swapped."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module: expected torch.nn.Module, got {type(module).__name__}. Call {usage}")


def _require_saveable(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name!r:.200}: expected a tensor, got {type(value).__name__}. Save it with save_checkpoint")
    _refuse_subclass(name, value)
    if value.device.type != "cpu":
        raise TypeError(
            f"{name!r:.200}: expected a tensor in host memory, got one on {value.device}. Move the module there first, "
            "with module.cpu(), or seal its tensors on their device, with to_host"
        )


# The plan: which sealed tensor fills which tensor of the module.


def plan_load(
    module: Any,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | SealedFolder,
    keys: KeyRing,
    device: object,
    anchor: Anchor | str | os.PathLike[str] | None,
    *,
    strict: bool,
) -> tuple[list[Step], list[str], list[str], bool]:
    """Return the steps of `load_model`, which `fill` does, and the names that are missing and unexpected.

    The last value is whether the module may have tensors on the meta device that its ``state_dict`` lacks.
    Raise RuntimeError if these do not fit.
    """
    target = None if device is None else canonical(device)
    weights, files = _open(path, keys, anchor)
    state = module.state_dict(keep_vars=True)
    for file in files:
        _refuse_plain((name for name in state if name not in weights), file)
    for name, tensor in state.items():
        if name in weights:
            _refuse_subclass(name, tensor)
    owners = _owners(module)
    steps, problems = _plan(owners, state, weights, target)
    shared = fill_in_order(steps)
    missing = [name for name in state if name not in weights and not _is_filled(state[name], steps)]
    widened = [step.sealed for step in steps if step.is_widened]
    applied = {scale.name for sealed in widened if (scale := getattr(sealed, "scale", None)) is not None}
    unexpected = [name for name in weights if name not in state and name not in applied]
    if strict:
        for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                quoted = ", ".join(f'"{name}"' for name in names)
                problems.insert(0, f"{kind} key(s) in state_dict: {quoted}.")
    if strict and not problems:
        problems = _conflicts(steps, shared, keys)
    if problems:
        source = _source_name(path)
        if not weights:
            raise FormatError(f"{source}: expected sealed weights, got none; `fastrack seal` seals a file")
        raise RuntimeError("\n\t".join([f"Error(s) in loading {source} into {type(module).__name__}:", *problems]))
    listed = set(map(id, state.values()))
    return steps, missing, unexpected, any(held for number, held in owners.items() if number not in listed)


def _left_on_meta(module: Any) -> list[str]:
    state = module.state_dict(keep_vars=True)
    return [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in state]


def _owners(module: Any) -> dict[int, list[tuple[Any, str]]]:
    """Return the owners of each tensor that may be replaced by its id, and an empty list for each other tensor."""
    owners: dict[int, list[tuple[Any, str]]] = {}
    elsewhere: list[tuple[Any, str]] = []
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):  # noqa: SLF001 - all that state_dict reads
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if tensor.is_meta or is_sharded(tensor):
                    owners.setdefault(id(tensor), []).append((owner, name))
                else:
                    owners[id(tensor)] = elsewhere
    return owners


class Step(NamedTuple):
    """One sealed tensor, and the tensor of the module that it fills or, on the meta device, replaces.

    Attributes
    ----------
    sealed : of a DTensor, the part of this process
    local : the local part of a DTensor, else `tensor`
    fits : whether `local` can be filled in place, in its own dtype, and before other steps of its memory
    owners : of a tensor that may be replaced
    is_widened : whether it opens as its product with its scales
    """

    sealed: SealedTensor | SealedRows
    tensor: Any
    local: Any
    device: str
    fits: bool
    owners: _Owners
    is_widened: bool = False

    @property
    def dtype(self) -> str:
        """The dtype that it opens in, by its safetensors name."""
        return WIDENED if self.is_widened else self.sealed.dtype


def _refuse_subclass(name: str, tensor: Any) -> None:
    """Refuse a subclass whose bytes are not laid out like a dense tensor of its shape."""
    kind = type(tensor)
    if kind is torch.nn.Parameter or kind is torch.Tensor or getattr(kind, "is_placeholder", False):  # of `offload`
        return
    if is_sharded(tensor):
        tensor = local_part(tensor)
        kind = type(tensor)
    if not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
        return
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and (
        not tensor.is_meta or kind in {torch.Tensor, torch.nn.Parameter}
    ):
        return
    raise TypeError(
        f"{name!r:.200} is a {kind.__qualname__}: expected a dense torch.Tensor or Parameter, or a DTensor of these. "
        "Load or save the module before it is quantised"
    )


def _open(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | SealedFolder,
    keys: KeyRing,
    anchor: Anchor | str | os.PathLike[str] | None,
) -> tuple[dict[str, SealedTensor], list[SealedFile]]:
    """Return all sealed tensors of a file, a folder or several files, and the closed files."""
    if isinstance(source, SealedFolder) or (isinstance(source, (str, os.PathLike)) and Path(source).is_dir()):
        return open_folder(source, keys, anchor).weights(), []
    anchor = resolve_anchor(anchor)
    with ExitStack() as stack:
        files = [stack.enter_context(load_file(path, anchor=anchor)) for path in several(source)]
        for file in files:
            require_tensors(file)
        return merge_tensors(files), files


def _source_name(source: object) -> str:
    """Return the name of the source of weights, for errors."""
    if isinstance(source, SealedFolder):
        return str(source.path)
    return str(locate(source)) if isinstance(source, (str, os.PathLike)) else "several files"


def _refuse_plain(state: Iterable[str], file: SealedFile) -> None:
    for name in state:
        if name in file.plain:
            raise AuthenticationError(
                f"{file.path} stores {name!r:.200} unencrypted and unauthenticated; refusing to load it. Get the file "
                f"sealed, or load that tensor on purpose, from load_file(path).plain[{name!r:.200}]",
                tensor=name,
                path=file.path,
            )


def _plan(
    owners: Mapping[int, _Owners], state: dict[str, Any], weights: Mapping[str, SealedTensor], device: str | None
) -> tuple[list[Step], list[str]]:
    names: dict[torch.device, str] = {}
    steps, problems = [], []
    for name, tensor in state.items():
        sealed = weights.get(name)
        if sealed is None:
            continue
        held = owners.get(id(tensor))
        part: SealedTensor | SealedRows = sealed
        local = tensor
        is_widened = _is_widened(sealed, tensor, state)
        dtype = WIDENED if is_widened else sealed.context.dtype  # its text, which compares faster
        fits = held is not None and fits_in_place(sealed, tensor, dtype)
        if not fits:
            problem = _problem(sealed, tensor, held, device, dtype)
            if problem:
                problems.append(f"{name}: {problem}")
                continue
            local = local_part(tensor)
            if is_sharded(tensor):
                part = select_box(sealed, *local_box(tensor))
                fits = fits_in_place(part, local, dtype)
        target = _meta_device(tensor, device) if local.is_meta else names.get(local.device)
        if target is None:
            target = names[local.device] = canonical(local.device)
        steps.append(Step(part, tensor, local, target, fits, held or (), is_widened))
    return steps, problems


def _is_widened(sealed: SealedTensor, tensor: Any, state: Mapping[str, Any]) -> bool:
    """Return True for quantised values if the module has another dtype, and no place for their scales."""
    return sealed.scale is not None and sealed.scale.name not in state and dtypes.to_torch(sealed.dtype) != tensor.dtype


def _meta_device(tensor: Any, device: str | None) -> str:
    """Return the device for a tensor on the meta device: by default the device of its mesh, or "cpu"."""
    if device is None and is_sharded(tensor) and tensor.device_mesh.device_type == "cuda":
        return canonical(f"cuda:{torch.cuda.current_device()}")
    return canonical(device)


def _problem(sealed: SealedTensor, tensor: Any, owners: _Owners | None, device: str | None, kind: str) -> str | None:
    """Return the reason why a tensor of the module cannot be filled, or None."""
    if owners is None:
        return "expected a parameter or buffer, got a value that state_dict computes. Load it separately"
    if torch.nn.parameter.is_lazy(tensor):
        return "expected a parameter with a shape, got a lazy one. Run the module once, then load"
    try:
        dtype, shape = dtypes.to_torch(kind), dtypes.torch_shape(kind, sealed.shape)
    except TypeError as error:
        return str(error)
    if shape != tuple(tensor.shape):
        return f"size mismatch: {list(shape)} in the file, {list(tensor.shape)} in the module"
    if not is_sharded(tensor):
        return _layout_problem(tensor, tensor, dtype)
    return _sharding_problem(tensor, sealed, device, kind) or _layout_problem(tensor, local_part(tensor), dtype)


def _sharding_problem(tensor: Any, sealed: SealedTensor, device: str | None, kind: str) -> str | None:
    if kind != sealed.dtype:
        return "expected a weight that is not quantised in a sharded module, got one that is, which opens whole"
    expected, got = tensor.device_mesh.device_type, _meta_device(tensor, device)
    if local_part(tensor).is_meta and not got.startswith(expected):
        return f"expected device= to be that of its device mesh, {expected}, got {got}. Or call module.to_empty first"
    if dtypes.BITS[sealed.dtype] % 8:
        return f"expected a dtype of whole bytes in a sharded module, got {sealed.dtype}"
    return sharding_problem(tensor)


def _layout_problem(tensor: Any, local: Any, dtype: torch.dtype) -> str | None:
    if local.is_meta:
        if tensor.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            return f"expected a dtype that can have a gradient, got {dtype}"
    elif local.layout != torch.strided or local.is_quantized:
        return "expected a dense tensor in the module"
    elif not local.is_contiguous() and any(
        stride == 0 and extent > 1 for stride, extent in zip(local.stride(), local.shape, strict=True)
    ):
        return "several elements of the tensor share one address. Make it contiguous first"
    return None


def _is_filled(tensor: Any, steps: list[Step]) -> bool:
    """Return True if a tensor lies in memory that the steps fill."""
    if not isinstance(tensor, torch.Tensor):
        return False
    local = local_part(tensor)
    if local.is_meta or not local.numel():
        return any(step.tensor is tensor for step in steps)
    return any(_covers(step.local, local) for step in steps)


def _covers(outer: Any, inner: Any) -> bool:
    if outer.is_meta or outer.device != inner.device:
        return False
    if storage_key(outer) == storage_key(inner):
        return True
    start, stop = _extent(inner)
    first, last = _extent(outer)
    return bool(outer.is_contiguous()) and first <= start and stop <= last


def _extent(tensor: Any) -> tuple[int, int]:
    """Return the addresses of the first element and after the last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _conflicts(steps: Sequence[Step], several: list[list[int]], keys: KeyRing) -> list[str]:
    """Return the problems of tensors that go into one memory and differ. They are opened into another one before."""
    problems = []
    for numbers in several:
        shared = [steps[number] for number in numbers]
        pairs = list(zip(shared, _places(shared), strict=True))
        # On the meta device a tensor gets the dtype of the file.
        is_equal = not shared[0].local.is_meta or len({step.dtype for step in shared}) == 1
        for number, (step, place) in enumerate(pairs + pairs):
            dtype = WIDENED if step.is_widened else None
            opened = to_device(step.sealed, step.device, keys=keys, framework="torch", dtype=dtype)
            if number < len(pairs):
                place.copy_(opened)
            elif is_equal:  # as bytes: 0.0 would equal -0.0, and no NaN another
                kept, opened = place.resolve_conj().resolve_neg().flatten(), opened.to(place.dtype).flatten()
                is_equal = torch.equal(kept.view(torch.uint8), opened.view(torch.uint8))
        if not is_equal:
            problems.append(
                f"{', '.join(step.sealed.name for step in shared):.400}: expected equal tensors for one memory of the "
                "module, got others. Load them into a module that does not tie them; strict=False keeps the last"
            )
    return problems


def _places(shared: list[Step]) -> list[Any]:
    """Return new tensors that overlap in memory as those of the steps do."""
    first, device = shared[0].local, shared[0].device
    if first.is_meta:
        return [torch.empty(first.shape, dtype=dtypes.to_torch(shared[0].dtype), device=device)] * len(shared)
    extents = [_extent(step.local) for step in shared]
    start = min(start for start, _ in extents) & -16  # where an element of any dtype may begin
    memory = torch.empty(max(stop for _, stop in extents) - start, dtype=torch.uint8, device=device).untyped_storage()
    places = []
    for step, (address, _) in zip(shared, extents, strict=True):
        local, place = step.local, torch.empty(0, dtype=step.local.dtype, device=device)
        place.set_(memory, (address - start) // local.element_size(), local.shape, local.stride())
        place = torch._neg_view(place) if local.is_neg() else place  # noqa: SLF001 - only by `imag` of a conjugate else
        places.append(place.conj() if local.is_conj() else place)
    return places


# Loading. Every check that is possible beforehand was made.


def fill(steps: list[Step], keys: KeyRing, progress: Progress | bool | None = False) -> None:
    """Authenticate all headers, then open all tensors. An error leaves zeros in tensors that were written to."""
    devices: dict[str, list[Step]] = {}
    for step in steps:
        devices.setdefault(step.device, []).append(step)
    for device in devices:
        to_device((), device)  # raises now if the device cannot be used, or failed before
    filled: list[Any] = []
    fresh: list[tuple[Step, Any]] = []
    # The end of the groups waits for every transfer, and raises if one failed.
    with torch.no_grad(), ExitStack() as undoing, ExitStack() as groups:
        total = sum(step.sealed.nbytes for step in steps)
        advance = groups.enter_context(reported(total, progress))
        moves: list[tuple[list[Step], Callable[[], Any]]] = []
        for device, here in devices.items():
            moves.extend(_prepare(here, groups.enter_context(group(device)), keys, device))
        undoing.push(partial(_clear, filled))  # all headers are authentic: from here on tensors are written to
        for chosen, move in moves:
            filled.extend(step.local for step in chosen if not step.local.is_meta)
            for step, opened in zip(chosen, move(), strict=True):
                tensor = step.local
                if tensor.is_meta:
                    fresh.append((step, opened))
                elif opened is not tensor:
                    tensor.copy_(opened)
            if not is_small(total):
                give_back(step.sealed for step in chosen)
            advance(sum(step.sealed.nbytes for step in chosen))
    for step, opened in fresh:
        _replace(step, opened)


def _prepare(
    steps: list[Step], start: Any, keys: KeyRing, device: str
) -> Iterator[tuple[list[Step], Callable[[], Any]]]:
    """Authenticate the headers of the tensors of a device, and yield what opens them: those to widen apart."""
    for dtype in (None, WIDENED):
        alike = [step for step in steps if step.is_widened is (dtype is not None)]
        for chosen in in_parts(alike, device, lambda step: step.sealed):
            first = chosen[0]
            if len(chosen) == 1 and takes_pieces(first.sealed, device, dtype=dtype):
                yield chosen, _prepare_pieces(first.sealed, first.local if first.fits else None, keys)
                continue
            out = [step.local if step.fits else ALLOCATE for step in chosen]
            sealed = [step.sealed for step in chosen]
            yield chosen, start.prepare(sealed, keys=keys, framework="torch", out=out, dtype=dtype)


def _prepare_pieces(sealed: SealedTensor, out: Any, keys: KeyRing) -> Callable[[], Any]:
    """Authenticate the header of a large tensor, and return a function that opens it."""
    with OpenMessage(sealed, keys):
        return lambda: [open_in_pieces(sealed, keys=keys, out=out, framework="torch")]


def fill_in_order(steps: list[Step]) -> list[list[int]]:
    """Return the numbers of steps whose tensors overlap in memory, or are one on the meta device, a list for each.

    Only the first of them fills its tensor in place: the others open elsewhere, and are copied there after it.
    """
    extents = []
    for number, step in enumerate(steps):
        if step.local.is_meta:
            extents.append(("meta", id(step.tensor), id(step.tensor) + 1, number))
        elif step.local.numel():
            extents.append((step.device, *_extent(step.local), number))
    found: list[list[int]] = []
    place, end = "", 0  # of the last list
    for device, start, stop, number in sorted(extents):
        if device == place and start < end:
            found[-1].append(number)
        else:
            found.append([number])
        place, end = device, max(end, stop) if device == place else stop
    several = [sorted(numbers) for numbers in found if len(numbers) > 1]
    for numbers in several:
        for number in numbers[1:]:
            steps[number] = steps[number]._replace(fits=False)
    return several


def fits_in_place(sealed: SealedTensor | SealedRows, tensor: Any, dtype: str) -> bool:
    """Return whether a tensor can be filled in place, in its own shape and in the dtype that it opens in."""
    kind = type(tensor)
    if (kind is not torch.nn.Parameter and kind is not torch.Tensor) or tensor.is_meta:
        return False
    if dtypes.to_torch(dtype) is not tensor.dtype or dtypes.torch_shape(dtype, sealed.shape) != tensor.shape:
        return False
    return bool(tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()))


def _clear(filled: list[Any], _: object, error: BaseException | None, *__: object) -> None:
    """Overwrite tensors with zeros after an error."""
    if error is None:
        return
    for tensor in filled:
        with suppress(Exception):
            tensor.zero_()
    error.add_note(f"{len(filled)} tensors of the module had been written to, and hold zeros now. Load it again")


def _replace(step: Step, opened: Any) -> None:
    """Replace a tensor on the meta device, in all modules that hold it."""
    if is_sharded(step.tensor):
        from torch.distributed.tensor import DTensor

        whole = step.tensor
        opened = DTensor.from_local(
            opened, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    if isinstance(step.tensor, torch.nn.Parameter):
        opened = torch.nn.Parameter(opened, requires_grad=step.tensor.requires_grad)
    for owner, name in step.owners:
        setattr(owner, name, opened)
