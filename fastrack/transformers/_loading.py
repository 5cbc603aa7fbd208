"""Models, tokenizers and adapters from sealed folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._models.mounts import Mount
from fastrack._sets.folder import SealedFolder, open_folder
from fastrack._util.shown import shown
from fastrack.errors import FormatError
from fastrack.transformers._offload import attach, taking_changed

if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor

Loaded = TypeVar("Loaded")
_REFUSED = ("state_dict", "gguf_file", "adapter_kwargs", "from_tf", "from_flax")
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def from_pretrained(
    cls: type[Loaded],
    folder: SealedFolder | str | os.PathLike[str],
    *args: Any,
    keys: KeySource | None = None,
    anchor: Anchor | str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Loaded:
    """Load a model, a tokenizer, a configuration or a processor from a sealed folder, like ``cls.from_pretrained``.

    Parameters
    ----------
    cls : type
        A class of transformers that has ``from_pretrained``, such as ``AutoModelForCausalLM`` or ``AutoTokenizer``, or
        of diffusers, such as ``DDPMPipeline``.
    folder : path, URL or SealedFolder
        A folder that `fastrack.seal_folder` or ``fastrack seal`` made.
    *args
        Arguments of the model.
    keys : KeySource, optional
        As for `fastrack.to_device`.
    anchor : Anchor or path, optional
        As for `fastrack.load_folder`.
    **kwargs
        Arguments of ``cls.from_pretrained``: ``dtype``, ``device_map``, ``subfolder``, ``variant`` and so on. With
        ``trust_remote_code=True``, authenticated code in the folder is run, and no other code. Weights that
        ``device_map`` leaves on the "disk" stay sealed in `folder`, which has to stay, and each is opened when its
        module is called, the next one meanwhile. ``offload_folder`` takes, sealed under a key of this process, those
        that transformers changes while it loads them, such as experts.

    Returns
    -------
    object
        Result of ``cls.from_pretrained``.

    Raises
    ------
    ValueError
        If an argument would load another source, or write unencrypted weights to a disk, or `cls` is a class of PEFT:
        `fastrack.mount_folder` serves these.
    AuthenticationError
        If a file or a chunk was altered. `RollbackError` if a file is missing, or of another seal.
    UnknownKeyError, FormatError, SignatureError, DeviceError, OSError
        As from `fastrack.load_folder` and `fastrack.to_device`.

    Examples
    --------
    >>> import fastrack.transformers
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> model = fastrack.transformers.from_pretrained(
    ...     AutoModelForCausalLM, "sealed", keys="owner.key", dtype="auto", device_map="cuda:0"
    ... )  # doctest: +SKIP
    >>> tokenizer = fastrack.transformers.from_pretrained(AutoTokenizer, "sealed", keys="owner.key")  # doctest: +SKIP
    """
    _require_call("from_pretrained(cls, folder)", cls, kwargs, fits=isinstance(cls, type))
    is_model = _is_model(cls)
    _refuse(cls, kwargs, is_model=is_model)
    ring = KeyRing.resolve(keys)
    opened = open_folder(folder, ring, anchor)
    trusted = bool(kwargs.pop("trust_remote_code", False))
    if cls.__module__.startswith("transformers.models.auto"):
        kwargs["trust_remote_code"] = trusted  # without a word it would ask at the terminal
    if is_model:
        _require_model(opened, kwargs)
    # A model beside an adapter would be replaced by the one that the adapter names.
    hidden = (_ADAPTER, _ADAPTER_WEIGHTS) if is_model else ()
    kwargs["local_files_only"] = True
    with (
        Mount(opened, ring, code=trusted, hidden=hidden) as mount,
        _naming(opened, mount),
        taking_changed(kwargs.get("offload_folder")) as changed,
    ):
        if changed is not None:
            kwargs["offload_folder"] = changed.folder
        loaded = cast(Any, cls).from_pretrained(str(mount.path), *args, **kwargs)
        found: Any = loaded[0] if is_model and kwargs.get("output_loading_info") else loaded
        if is_model:
            attach(found, mount, ring, changed)
        else:
            mount.keep_for(loaded)
    for each in (found, getattr(found, "config", found)):
        with contextlib.suppress(AttributeError):  # pipelines of diffusers have it fixed
            if hasattr(each, "name_or_path"):
                each.name_or_path = str(opened.path)  # in the place of the private folder
    if is_model and _ADAPTER in opened.files and not kwargs.get("subfolder"):
        load_adapter(found, opened, keys=keys)
    return cast(Loaded, loaded)


def load_adapter(
    model: Any,
    folder: SealedFolder | str | os.PathLike[str],
    *,
    keys: KeySource | None = None,
    anchor: Anchor | str | os.PathLike[str] | None = None,
    adapter_name: str = "default",
    **kwargs: Any,
) -> None:
    """Load an adapter of PEFT from a sealed folder into a model of transformers, like its ``load_adapter``.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model that the adapter was trained for.
    folder : path, URL or SealedFolder
        A sealed folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
    keys, anchor
        As for `from_pretrained`.
    adapter_name : str
        The name that the adapter gets in the model.
    **kwargs
        Other arguments of ``model.load_adapter``.

    Raises
    ------
    ValueError
        As for `from_pretrained`, or if the model has an adapter of that name.
    AuthenticationError, UnknownKeyError, FormatError, SignatureError, DeviceError, OSError
        As for `from_pretrained`.

    Examples
    --------
    >>> import fastrack.transformers
    >>> fastrack.transformers.load_adapter(model, "sealed-adapter", keys="owner.key")  # doctest: +SKIP
    """
    _require_call("load_adapter(model, folder)", model, kwargs, fits=hasattr(model, "load_adapter"))
    ring = KeyRing.resolve(keys)
    opened = open_folder(folder, ring, anchor)
    if _ADAPTER not in opened.files:
        raise FormatError(f"{opened.path}: expected an adapter with {_ADAPTER}, got none. Name the folder of one")
    with Mount(opened, ring) as mount, _naming(opened, mount):
        model.load_adapter(str(mount.path), adapter_name=adapter_name, **kwargs)


@contextlib.contextmanager
def _naming(folder: SealedFolder, mount: Mount) -> Iterator[None]:
    """Name the sealed folder in errors of a library, which knows only the private folder."""
    try:
        yield
    except Exception as error:
        private, sealed = str(mount.path), str(folder.path)
        error.args = tuple(each.replace(private, sealed) if isinstance(each, str) else each for each in error.args)
        if isinstance(error, OSError) and isinstance(error.filename, str):
            error.filename = error.filename.replace(private, sealed)
        raise


def _refuse(cls: type, kwargs: Mapping[str, Any], *, is_model: bool) -> None:
    for name in _REFUSED if is_model else (*_REFUSED, "offload_folder"):
        if kwargs.get(name):
            raise ValueError(f"{name}=: expected none for a sealed folder, got one. Leave it out")
    if isinstance(kwargs.get("config"), (str, os.PathLike)):
        message = "config=: expected a configuration, got the name of one, which nothing authenticates"
        raise ValueError(message)  # noqa: TRY004 - the type is one that transformers takes
    device_map = kwargs.get("device_map")
    if not is_model and "disk" in (device_map.values() if isinstance(device_map, Mapping) else [device_map]):
        raise ValueError("device_map=: expected devices with memory for all weights, got disk. Give it less to hold")
    if cls.__module__.partition(".")[0] == "peft":
        raise ValueError(
            f"{cls.__name__}: expected a class that needs only a folder, got one of PEFT, which needs a model too. "
            "Load the model; then load_adapter(model, folder), or PeftModel.from_pretrained(model, path) within `with "
            "fastrack.mount_folder(folder) as path`"
        )


def _require_call(usage: str, first: object, kwargs: Mapping[str, Any], *, fits: bool) -> None:
    if not fits:
        raise TypeError(f"expected a class or a model of transformers, got {shown(first)}. Call {usage}")
    if "key" in kwargs:  # which libraries would pass over
        raise TypeError(f"expected keys=, got key=. Call {usage[:-1]}, keys=...)")


def _is_model(cls: type) -> bool:
    names = {base.__name__ for base in cls.__mro__ if base.__module__.startswith("transformers.")}
    return not names.isdisjoint({"PreTrainedModel", "_BaseAutoModelClass"})


def _require_model(folder: SealedFolder, kwargs: Mapping[str, Any]) -> None:
    subfolder = kwargs.get("subfolder") or ""
    if f"{subfolder}/config.json".lstrip("/") not in folder.files and not kwargs.get("config"):
        hint = "; load_adapter loads an adapter into its model" if _ADAPTER in folder.files else ""
        raise FormatError(f"{folder.place(subfolder)}: expected a model with config.json, got none{hint}")
