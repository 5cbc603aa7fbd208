"""The process that starts vLLM: what it reads of a sealed folder is authenticated, and copied, before it reads it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from fastrack._devices.confidential import requirement
from fastrack._keys.keyring import KeyRing
from fastrack._models.mounts import Mount
from fastrack._patches.attributes import replace
from fastrack._sets.folder import load_folder
from fastrack._util.shown import shown
from fastrack.errors import FormatError
from fastrack.vllm._folders import authenticate, digest_of

FORMAT = "fastrack"
_GIVEN, _FOUND = {"anchor", "keys", "require"}, {"copy", "file", "files", "folder"}
_mounts: list[Mount] = []  # as long as this process, as vLLM reads tokenizers late


def install() -> None:
    """Register the loader, and have the arguments of engines read sealed folders by private copies."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor import model_loader

    from fastrack.vllm._adapters import install as install_adapters
    from fastrack.vllm._loader import SealedModelLoader

    install_adapters()
    # `create_engine_config` looks into config.json for a speculator, whose model it then takes, before all else; others
    # call only `create_model_config`.
    originals = {method: getattr(EngineArgs, method) for method in ("create_engine_config", "create_model_config")}
    for method, original in originals.items():
        if not hasattr(original, "fastrack_original"):
            replace(EngineArgs, method, _with_copy(original))
    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if known.get(FORMAT) is not SealedModelLoader:
        model_loader.register_model_loader(FORMAT)(SealedModelLoader)


def _with_copy(original: Any) -> Any:
    @functools.wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.load_format == FORMAT:
            use_copy(self)
        return original(self, *args, **kwargs)

    create.fastrack_original = original  # type: ignore[attr-defined]
    return create


def use_copy(arguments: Any) -> None:
    """Have the arguments of an engine name a private copy in the place of a sealed folder, once it was authenticated.

    The weights of the copy are stubs. What a worker needs to open the same folder goes into the loader's settings.
    """
    extra = arguments.model_loader_extra_config
    is_done = isinstance(extra, Mapping) and extra.keys() == _GIVEN | _FOUND
    draft = arguments.spec_model or (arguments.speculative_config or {}).get("model")
    others = {arguments.model, extra["folder"]} if is_done else {arguments.model}
    if (is_done and arguments.model != extra["copy"]) or draft not in {None, *others}:
        raise FormatError(
            "load_format='fastrack': expected one model, whose folder is authenticated, got another beside it, or in "
            "its place, for speculative decoding. Leave out the speculation, or the load format"
        )
    if is_done:
        return  # these arguments were used before
    keys, anchor = settings_of(extra)
    ring = KeyRing.resolve(keys)
    folder = load_folder(arguments.model, ring, anchor=anchor)
    authenticate(folder)
    mount = Mount(folder, ring, code=bool(arguments.trust_remote_code))
    _mounts.append(mount)
    copy, sealed = str(mount.path), str(arguments.model)
    arguments.model_loader_extra_config = {
        "anchor": anchor,
        "copy": copy,
        "file": folder.file_id,
        "files": digest_of(folder),
        "folder": str(folder.path),
        "keys": keys,
        "require": requirement(extra.get("require"), "require"),
    }
    if arguments.served_model_name is None:
        arguments.served_model_name = sealed
    for name in ("tokenizer", "hf_config_path"):
        if getattr(arguments, name) == arguments.model:
            setattr(arguments, name, copy)
    arguments.model = copy  # by default of the tokenizer, too


def settings_of(extra: object) -> tuple[str | None, str | None]:
    """Return the source of keys and the anchor in the loader's settings."""
    if not isinstance(extra, Mapping) or not extra.keys() <= _GIVEN:
        got = ", ".join(sorted(map(str, extra.keys() - _GIVEN))) if isinstance(extra, Mapping) else shown(extra)
        raise ValueError(
            f"model_loader_extra_config: expected keys, anchor and require, got {got:.200}. Leave others out"
        )
    for name, value in extra.items():
        if not isinstance(value, (str, os.PathLike, type(None))):
            raise TypeError(
                f"model_loader_extra_config: expected the path of a file, or the name of a provider, as {name}, got "
                f"{shown(value)}. vLLM sends the setting to its workers, and logs it: store a key in a file"
            )
    keys, anchor = (None if extra.get(name) is None else os.fspath(extra[name]) for name in ("keys", "anchor"))
    return keys, anchor
