"""`reloadable`: a torch module that gets new weights as a whole, while other threads call it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastrack._util.extras import require
from fastrack._util.public import public

if TYPE_CHECKING:
    import torch

    from fastrack._models.generations import ReloadableModule


@public
def reloadable(module: torch.nn.Module) -> ReloadableModule:
    """Return a module that calls `module`, and gets new sealed weights by its `reload` while it is called.

    ``live.reload(path, keys)`` takes the arguments of `load_model` and returns the same. It loads a copy of the module
    and then puts the copy in its place. A call that began before ends with the old weights, and a later one has only
    new ones. If a file is altered, does not fit, or is not whole, the error of `load_model` is raised and the old
    weights stay. Reloads on several threads take turns.

    Parameters
    ----------
    module : torch.nn.Module
        Module in use, whose parameters and buffers are on their devices, or on torch's meta device if the first
        `reload` says which ``device=``. ``copy.deepcopy`` must copy it; its state besides the weights goes with it.

    Returns
    -------
    torch.nn.Module
        Its ``module`` is the module with the newest weights, another one after each `reload`: ``live.module`` is saved
        by `save_model`, and has the names of ``state_dict``. Other attributes are those of ``module``, for example
        ``live.generate``, which has the weights of one file until it returns. `train`, `eval`, `to`, `requires_grad_`
        and `load_state_dict` wait for a `reload` that has begun. To compile, call ``live.compile()``, or pass
        ``torch.compile(module)``.

    Raises
    ------
    TypeError
        If `module` cannot be copied, has DTensors, or refers to itself by a function, through its closure, its globals
        or what these hold, as a wrapped ``forward`` or a cached method does: its copy would call the old weights.

    Notes
    -----
    A `reload` takes the memory of a second module. The memory of the old one is freed when the last call that began
    before has ended, on a GPU after its kernels, provided that nothing else refers to it: keep no reference to
    `module`. In asyncio call it as ``await asyncio.to_thread(live.reload, path, keys)``.

    Examples
    --------
    >>> import fastrack
    >>> import torch
    >>> key = fastrack.Key.generate()
    >>> newer = torch.nn.Linear(3, 2)
    >>> fastrack.save_model(newer, "model.safetensors", key=key)
    >>> live = fastrack.reloadable(torch.nn.Linear(3, 2))
    >>> live.reload("model.safetensors", key)
    <All keys matched successfully>
    >>> torch.equal(live(torch.ones(3)), newer(torch.ones(3)))
    True
    """
    require("torch", "reloadable", "torch")
    from fastrack._models.generations import ReloadableModule

    return ReloadableModule(module)
