"""Checkpoints of Lightning's Trainer as sealed files."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy

from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._training.checkpoint import load_checkpoint, save_checkpoint
from fastrack._training.state import encode_state
from fastrack._util.locations import locate

# Strategies that write files themselves, and the attribute value that makes them save through the plugin instead.
_WHOLE = {FSDPStrategy: ("_state_dict_type", "full"), ModelParallelStrategy: ("_save_distributed_checkpoint", False)}


class SealedCheckpointIO(CheckpointIO):  # type: ignore[misc]  # not installed where types are checked
    """Plugin of Lightning's Trainer that seals its checkpoints."""

    def __init__(self, key: Key, ring: KeyRing) -> None:
        self._key = key
        self._ring = ring

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Seal a checkpoint into a new file."""
        if storage_options is not None:
            raise TypeError("saving a sealed checkpoint failed: expected storage_options=None, got others. Omit them")
        location = locate(path)
        if isinstance(location, Path):
            location.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(path, checkpoint, key=self._key)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = None, **_: Any) -> Any:
        """Open a checkpoint in host memory; Lightning moves it to its devices."""
        return load_checkpoint(path, keys=self._ring)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint: a file, or a folder that a strategy wrote."""
        files = get_filesystem(path)
        if files.exists(path):
            files.rm(path, recursive=True)


def _is_ours(plugin: Any) -> bool:
    """Return whether a plugin seals, or wraps a plugin that does, such as Lightning's asynchronous one."""
    while plugin is not None and not isinstance(plugin, SealedCheckpointIO):
        plugin = getattr(plugin, "checkpoint_io", None)
    return plugin is not None


def _require_use(strategy: Any) -> None:
    """Refuse a strategy that would write plain checkpoints past its plugin."""
    saving = next(kind for kind in type(strategy).__mro__ if "save_checkpoint" in vars(kind))
    name, whole = _WHOLE.get(saving, ("", None))
    if saving not in {Strategy, FabricStrategy} and (not name or getattr(strategy, name, None) != whole):
        raise ValueError(
            f"checkpoint_io: expected a strategy that saves with its plugin, got {type(strategy).__name__}, which "
            "would write plain checkpoints by itself. Save with torch.distributed.checkpoint and a CheckpointWriter, "
            "or, without Lightning's resuming, whole ones by ModelParallelStrategy(save_distributed_checkpoint=False) "
            "or FSDPStrategy(state_dict_type='full')"
        )


def _require_storable(module: Any) -> None:
    """Refuse hyperparameters that cannot be sealed, before the first step and not only after an epoch."""
    for owner in (module, module.trainer.datamodule):
        hparams = getattr(owner, "hparams", None) or {}
        try:
            encode_state(dict(hparams) if isinstance(hparams, dict) else hparams, "hparams")
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"checkpoint_io: {error}, or leave it out by save_hyperparameters(ignore=) in {type(owner).__name__}"
            ) from None


def _watch(strategies: Any) -> None:
    """Have a base class check its sealing plugin: Lightning tells no plugin its strategy."""
    plugin = strategies.checkpoint_io

    def set_plugin(strategy: Any, value: Any) -> None:
        if _is_ours(value):
            _require_use(strategy)
        plugin.fset(strategy, value)

    strategies.checkpoint_io = plugin.setter(set_plugin)


def _watch_start() -> None:
    connect = Strategy.connect

    @functools.wraps(connect)
    def check_and_connect(strategy: Any, module: Any) -> None:
        if _is_ours(strategy.checkpoint_io) and module.trainer.state.fn == "fit":
            _require_storable(module)
        connect(strategy, module)

    Strategy.connect = check_and_connect


_watch(Strategy)
_watch(FabricStrategy)
_watch_start()
