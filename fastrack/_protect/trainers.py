"""Have the Trainers of transformers and Lightning rehearse a save before the first step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fastrack._patches.attributes import replace
from fastrack._patches.imports import Prepare, when_imported
from fastrack._protect.rehearsal import rehearse


def install() -> None:
    """Have the trainers rehearse, those that are imported later too."""
    when_imported(_TRAINERS)


def _prepare_transformers(module: ModuleType) -> None:
    def train(trainer: Any, *arguments: Any, **options: Any) -> Any:
        class RehearsedSave(module.TrainerCallback):  # type: ignore[misc,name-defined]
            """Callback that rehearses a save when the other callbacks are ready."""

            is_done = False  # training begins again where the size of batches is sought

            failure: Exception | None = None

            def on_train_begin(self, args: Any, _: Any, control: Any, **__: Any) -> None:
                saves = args.save_strategy != "no" or getattr(args, "enable_jit_checkpoint", False)
                # Processes rehearse together, and one of them may be the only one that a callback asks for a save.
                if (saves or control.should_save or _are_several()) and not self.is_done:
                    try:
                        _rehearse_transformers(trainer)
                    except Exception as error:
                        if saves:
                            raise
                        self.failure = error  # raised at the first save that is asked for, if any is
                    self.is_done = True
                if control.should_save and self.failure is not None:
                    raise self.failure

            on_step_end = on_epoch_end = on_evaluate = on_train_begin  # where another callback may ask for a first save

        callback = RehearsedSave()
        trainer.add_callback(callback)  # the last one
        try:
            return original(trainer, *arguments, **options)
        finally:
            trainer.remove_callback(callback)

    original = _wrap(module.Trainer, "train", train)


def _are_several() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _rehearse_transformers(trainer: Any) -> None:
    handler, args = trainer.callback_handler, trainer.args

    def save(folder: str) -> None:
        args.output_dir, args.push_to_hub, args.save_total_limit = folder, False, None
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        handler.callbacks = [each for each in callbacks if not type(each).__module__.startswith(_TRACKERS)]
        handler.on_save(args, trainer.state, trainer.control)

    callbacks = handler.callbacks
    rehearse(save, trainer, args, trainer.state, trainer.control, handler, *callbacks, elsewhere=True)


def _prepare_lightning(module: ModuleType) -> None:
    def on_run_start(loop: Any, *arguments: Any, **options: Any) -> Any:
        result = original(loop, *arguments, **options)
        keeping = ("save_top_k", "save_last", "save_on_exception")
        saves = [getattr(each, name, True) for each in loop.trainer.checkpoint_callbacks for name in keeping]
        if any(saves) and not loop.trainer.fast_dev_run:
            _rehearse_lightning(loop.trainer)
        else:
            loop.trainer.save_checkpoint = functools.partial(_save_rehearsed, loop.trainer)  # which a callback may call
        return result

    original = _wrap(module._FitLoop, "on_run_start", on_run_start)


def _save_rehearsed(trainer: Any, *arguments: Any, **options: Any) -> None:
    del trainer.save_checkpoint  # and have that of its class
    _rehearse_lightning(trainer)
    trainer.save_checkpoint(*arguments, **options)


def _rehearse_lightning(trainer: Any) -> None:
    strategy = trainer.strategy
    plugin = inner = strategy.checkpoint_io
    while getattr(inner, "checkpoint_io", None) is not None:  # one that saves in another thread, unseen
        inner = inner.checkpoint_io
    roots = [each for each in (trainer.lightning_module, trainer.datamodule) if each is not None]
    places: list[str] = []

    def save(folder: str) -> None:
        places.append(f"{folder}/rehearsal.ckpt")
        trainer.save_checkpoint(places[0])

    try:
        strategy.checkpoint_io = inner
        rehearse(save, *trainer.callbacks, *roots, elsewhere=True)
    finally:
        with contextlib.suppress(Exception):  # a plug-in may not have kept it, or not know how to remove anything
            strategy.remove_checkpoint(places[0])
        strategy.checkpoint_io = plugin


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Any:
    """Replace a method and return the original. `AttributeError` refuses a version that has no such method."""
    original = getattr(owner, name)
    replace(owner, name, functools.wraps(original)(wrapper))
    return original


_TRACKERS = "transformers.integrations."
"""Callbacks that send to a server what is in the folder, and write nothing themselves."""
_TRAINERS: dict[str, Prepare] = {
    "transformers.trainer": _prepare_transformers,
    "lightning.pytorch.loops.fit_loop": _prepare_lightning,
    "pytorch_lightning.loops.fit_loop": _prepare_lightning,
}
