"""`unchanged`: a block that leaves random states, optimizers and the attributes of given objects as they were."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_MANY = 10_000  # containers that are put back, and items up to which the containers in one are looked at


@contextlib.contextmanager
def unchanged(*roots: Any) -> Iterator[None]:
    """Run a block and undo what it did to random states, optimizers, and attributes of `roots`.

    Attributes that are dicts, lists or sets are put back in place, since others may hold them too. Other objects that
    the attributes refer to stay as the block left them.
    """
    held: dict[int, tuple[Any, Any]] = {}
    for root in roots:
        _hold(_own(root), held)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the state that is global
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    fresh: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: _require_fresh(optimizer, fresh))
    try:
        yield
    finally:
        hook.remove()
        for optimizer in fresh:
            optimizer.state.clear()
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)
        for container, content in held.values():
            _put_back(container, content)


def _require_fresh(optimizer: torch.optim.Optimizer, fresh: list[torch.optim.Optimizer]) -> None:
    """Take down an optimizer without a state.

    `torch.distributed.checkpoint.state_dict` has such a one take a step, without gradients and at a rate of 0, to have
    a state to save. Its count of steps would stay at 1, and the run would be another.
    """
    if optimizer.state and not any(optimizer is each for each in fresh):
        raise ValueError("rehearsing a save failed: expected no step of the optimizer, got one. Do not train in it")
    fresh.append(optimizer)


def _own(root: Any) -> Any:
    """Return the attributes of an object. Those that each module has are torch's, which changes them as it shards."""
    if isinstance(root, torch.nn.Module):
        theirs = vars(torch.nn.Module())
        return {name: value for name, value in vars(root).items() if name not in theirs}
    return getattr(root, "__dict__", None)


def _hold(first: Any, held: dict[int, tuple[Any, Any]]) -> None:
    """Note the content of a container, and then of those in it. A dataset may be among them: there is a bound."""
    waiting = deque([first])
    while waiting and len(held) < _MANY:
        value = waiting.popleft()
        if type(value) in {dict, list, set} and id(value) not in held:
            held[id(value)] = value, value.copy()
            if len(value) <= _MANY:
                waiting.extend(value.values() if type(value) is dict else value)


def _put_back(container: Any, content: Any) -> None:
    container.clear()
    if type(container) is list:
        container.extend(content)
    else:
        container.update(content)
