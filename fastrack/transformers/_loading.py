"""Models, tokenizers and adapters from sealed folders."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sets.folder import SealedFolder, open_folder
from fastrack.errors import FormatError
from fastrack.transformers._weights import lazy_weights

if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor

Loaded = TypeVar("Loaded")
_REFUSED = ("state_dict", "gguf_file", "offload_folder", "adapter_kwargs", "from_tf", "from_flax")
# Arguments of a model, but not of a configuration.
_OF_MODELS = ("dtype", "torch_dtype", "quantization_config", "generation_config", "output_loading_info", "device_map")
_ADAPTER = "adapter_config.json"


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
        A class of transformers that has ``from_pretrained``, such as ``AutoModelForCausalLM`` or ``AutoTokenizer``.
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
        ``trust_remote_code=True``, authenticated code in the folder is run, and no other code.

    Returns
    -------
    object
        Result of ``cls.from_pretrained``.

    Raises
    ------
    ValueError
        If an argument would load another source, or write weights to a disk in plain.
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
    _refuse(kwargs)
    ring = KeyRing.resolve(keys)
    opened = open_folder(folder, ring, anchor)
    trusted = bool(kwargs.pop("trust_remote_code", False))
    is_model = _is_model(cls)
    with PrivateCopy(opened, code=trusted) as copy:
        if trusted:
            _refuse_foreign_code(copy.path, opened)
        if is_model:
            loaded = _load_model(cls, copy.path, opened, ring, args, trusted, kwargs)
        else:
            loaded = _load_files(cls, copy.path, opened, args, trusted, kwargs)
            copy.keep_for(loaded)
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
    from peft import PeftConfig

    ring = KeyRing.resolve(keys)
    opened = open_folder(folder, ring, anchor)
    if _ADAPTER not in opened.files:
        raise FormatError(f"{opened.path}: expected an adapter with {_ADAPTER}, got none. Name the folder of one")
    with PrivateCopy(opened) as copy:
        config = PeftConfig.from_pretrained(str(copy.path))
    with opened.open("adapter_model.safetensors") as file:
        weights = lazy_weights(file, ring)
    model.load_adapter(peft_config=config, adapter_state_dict=weights, adapter_name=adapter_name, **kwargs)


def _refuse(kwargs: Mapping[str, Any]) -> None:
    for name in _REFUSED:
        if kwargs.get(name):
            raise ValueError(f"{name}=: expected none for a sealed folder, got one. Leave it out")
    device_map = kwargs.get("device_map")
    if "disk" in (device_map.values() if isinstance(device_map, Mapping) else [device_map]):
        raise ValueError("device_map=: expected devices with memory, got disk, where weights would be in plain")


def _is_model(cls: type) -> bool:
    names = {base.__name__ for base in cls.__mro__ if base.__module__.startswith("transformers.")}
    return not names.isdisjoint({"PreTrainedModel", "_BaseAutoModelClass"})


def _load_files(
    cls: Any, copy: Path, folder: SealedFolder, args: tuple[Any, ...], trusted: bool, kwargs: dict[str, Any]
) -> Any:
    """Return a tokenizer, a configuration or another object without weights."""
    if cls.__module__.startswith("transformers.models.auto"):
        kwargs["trust_remote_code"] = trusted
    loaded = cls.from_pretrained(str(copy), *args, **{**kwargs, "local_files_only": True})
    _rename(loaded, folder)
    return loaded


def _rename(loaded: Any, folder: SealedFolder) -> None:
    """Name the sealed folder as the origin, in place of the private copy."""
    if hasattr(loaded, "name_or_path"):
        loaded.name_or_path = str(folder.path)


# Private copies of the unencrypted files of a folder.


class PrivateCopy:
    """A copy of the authenticated, unencrypted files of a folder; of code only with `code`.

    Only this user can open it. It is removed at the end of the ``with`` block or with its owner.
    """

    def __init__(self, folder: SealedFolder, *, code: bool = False) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fastrack-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        for name in folder.plain_names:
            if code or not name.endswith(".py"):
                path = self.path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(folder.read(name))

    def keep_for(self, owner: object) -> None:
        """Keep the copy while `owner` lives, which may refer to it: a tokenizer to its vocabulary."""
        with contextlib.suppress(TypeError):  # tuples, say, cannot be referred to weakly
            weakref.finalize(owner, shutil.rmtree, self.path, ignore_errors=True)
            self._remove.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()


def _refuse_foreign_code(copy: Path, folder: SealedFolder) -> None:
    """Refuse configurations that refer to code of other repositories, which nothing authenticates."""
    for path in copy.rglob("*.json"):
        try:
            document = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            continue  # no configuration, which could refer to code
        if isinstance(document, dict) and "--" in json.dumps(document.get("auto_map")):
            raise ValueError(
                f"{folder.place(path.relative_to(copy).as_posix())}: trust_remote_code=: expected code in this folder, "
                "got a reference to another repository. Put the code into the folder, and seal it again"
            )


# Models.


def _load_model(
    cls: Any,
    copy: Path,
    folder: SealedFolder,
    keys: KeyRing,
    args: tuple[Any, ...],
    trusted: bool,
    kwargs: dict[str, Any],
) -> Any:
    subfolder, variant = kwargs.pop("subfolder", "") or "", kwargs.pop("variant", None)
    if f"{subfolder}/config.json".lstrip("/") not in folder.files and not kwargs.get("config"):
        hint = "; load_adapter loads an adapter into its model" if _ADAPTER in folder.files else ""
        raise FormatError(f"{folder.place(subfolder)}: expected a model with config.json, got none{hint}")
    config, kwargs = _load_config(cls, copy / subfolder, trusted, kwargs)
    _refuse_quantization(config, folder)
    has_loading_info = kwargs.get("output_loading_info", False)
    if kwargs.get("generation_config") is None:
        kwargs["generation_config"] = _load_generation_config(copy / subfolder)
    weights = lazy_weights(folder.weights(subfolder, variant), keys)
    model_class, config = _resolve_class(cls, config, copy / subfolder, trusted)
    loaded = model_class.from_pretrained(None, *args, config=config, state_dict=weights, **kwargs)
    model = loaded[0] if has_loading_info else loaded
    _rename(model, folder)
    _rename(model.config, folder)
    if not subfolder and _ADAPTER in folder.files:
        load_adapter(model, folder, keys=keys)
    return loaded


def _load_config(cls: Any, copy: Path, trusted: bool, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the configuration, and the other arguments."""
    from transformers import AutoConfig, PreTrainedConfig

    config = kwargs.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        return config, kwargs
    if config is not None:
        raise ValueError("config=: expected a configuration, got the name of one, which nothing authenticates")
    model_options = {name: kwargs.pop(name) for name in _OF_MODELS if name in kwargs}
    if getattr(cls, "config_class", None) is None:
        config, rest = AutoConfig.from_pretrained(
            str(copy), return_unused_kwargs=True, trust_remote_code=trusted, local_files_only=True, **kwargs
        )
    else:
        config, rest = cls.config_class.from_pretrained(
            str(copy), return_unused_kwargs=True, local_files_only=True, **kwargs
        )
    return config, {**rest, **model_options}


def _load_generation_config(copy: Path) -> Any:
    """Return the generation configuration. Older models have it in their own ``config.json``."""
    from transformers import GenerationConfig

    options: dict[str, Any] = {"local_files_only": True}
    if not (copy / "generation_config.json").exists():
        options |= {"config_file_name": "config.json", "_from_model_config": True}
    return GenerationConfig.from_pretrained(str(copy), **options)


def _refuse_quantization(config: Any, folder: SealedFolder) -> None:
    """Refuse weights that transformers reads only from plain files, because it needs their metadata."""
    quantization = getattr(config, "quantization_config", None) or {}
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "torchao":
        raise ValueError(
            f"{folder.path}: expected weights that torchao did not quantise, got such. Seal the model before "
            "it is quantised, and quantise it when it is loaded, with quantization_config="
        )


def _resolve_class(cls: Any, config: Any, copy: Path, trusted: bool) -> tuple[Any, Any]:
    """Return the class of the model, and its configuration, like the auto classes, which require a path."""
    from transformers.models.auto.auto_factory import _BaseAutoModelClass, _get_model_class

    if not issubclass(cls, _BaseAutoModelClass):
        return cls, config
    reference = (getattr(config, "auto_map", None) or {}).get(cls.__name__)
    if trusted and reference is not None:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(reference, str(copy), local_files_only=True), config
    if type(config) not in cls._model_mapping:
        raise ValueError(
            f"{cls.__name__}: expected another configuration, got {type(config).__name__}. Name the model's class; "
            "or run the code in the folder, with trust_remote_code=True"
        )
    model_class = _get_model_class(config, cls._model_mapping)
    text_config = config.sub_configs.get("text_config")
    if text_config is not None and getattr(model_class, "config_class", None) == text_config:
        quantization = getattr(config, "quantization_config", None)
        config = config.get_text_config()
        if quantization is not None:
            config.quantization_config = quantization
    return model_class, config
