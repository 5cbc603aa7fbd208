"""Callbacks by which Trainers of other libraries save after a preemption notice."""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import Any, Protocol

_TERMINATED = 143  # the status that shells give for SIGTERM; `torchrun` takes 0 for the end of the run


class Notice(Protocol):
    """The part of `PreemptionNotice` that callbacks use."""

    def is_due(self, group: Any = None, *, every: int = 1) -> bool: ...

    def _retake_signals(self) -> None: ...

    def _judge(self, seconds: float) -> None: ...


def make_lightning(notice: Notice, path: str | os.PathLike[str], every: int) -> Any:
    """Return a callback for a Trainer of Lightning, of the package that is in use."""
    lightning = sys.modules.get("pytorch_lightning") or import_module("lightning.pytorch")
    exceptions = import_module(f"{lightning.__name__}.utilities.exceptions")

    class SaveWhenPreempted(lightning.Callback):  # type: ignore[misc,name-defined]
        """Callback that saves once and ends the run."""

        _steps = 0  # of the optimizers

        def on_sanity_check_start(self, *_: Any) -> None:
            # Lightning's handler begins a collective wherever a rank happens to be, and other ranks do not.
            notice._retake_signals()  # noqa: SLF001 - of this package

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            notice._retake_signals()  # noqa: SLF001 - of this package
            self._steps = trainer.global_step

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            # Gradients that are accumulated are in no checkpoint.
            has_stepped, self._steps = trainer.global_step != self._steps, trainer.global_step
            if has_stepped and notice.is_due(_world(), every=every) and not trainer.is_last_batch:
                began = time.monotonic()
                trainer.save_checkpoint(path)
                notice._judge(time.monotonic() - began)  # noqa: SLF001 - of this package
                raise exceptions.SIGTERMException(_TERMINATED)

    return SaveWhenPreempted()


def make_transformers(notice: Notice, every: int) -> Any:
    """Return a callback for the Trainer of transformers."""
    transformers = import_module("transformers")

    class SaveWhenPreempted(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        """Callback that has the Trainer save and stop after the step, and measures all saves."""

        _began: float | None = None  # of a save
        _is_ending = False

        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> Any:
            if notice.is_due(_world(), every=every):
                self._is_ending = control.should_save = control.should_training_stop = True
                control.should_evaluate = False  # which would come before the save
            self._began = time.monotonic() if control.should_save else None
            return control

        def on_epoch_end(self, _: Any, __: Any, control: Any, **___: Any) -> Any:
            if self._is_ending:  # and has saved: the machine may end at any time
                control.should_evaluate = control.should_save = False
            return control

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            self._began = self._began and time.monotonic()

        def on_save(self, *_: Any, **__: Any) -> None:
            if self._began is not None:  # not a rehearsal
                notice._judge(time.monotonic() - self._began)  # noqa: SLF001 - of this package
                self._began = None

    return SaveWhenPreempted()


def _world() -> Any:
    """Return the default process group if it has several ranks."""
    import torch.distributed as dist

    is_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if is_several else None
