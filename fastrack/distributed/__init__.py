"""Sealed training on several machines: collectives of DDP and FSDP2, and checkpoints.

`init_process_group` replaces the function of torch: every message of the group is sealed.

`CheckpointWriter` and `CheckpointReader` are the StorageWriter and StorageReader of `torch.distributed.checkpoint`.
Each process seals its shards into its own file; a sealed description, written last, commits the checkpoint.
A checkpoint holds no pickle. `fastrack.protect_checkpoints` has trainers of other libraries use these classes.

Examples
--------
>>> import torch
>>> import torch.distributed.checkpoint as dcp
>>> import fastrack
>>> from fastrack.distributed import CheckpointReader, CheckpointWriter
>>> key = fastrack.Key.generate()
>>> state = {"model": torch.nn.Linear(3, 2).state_dict(), "step": 100}
>>> _ = dcp.save(state, storage_writer=CheckpointWriter("checkpoint", key=key), no_dist=True)
>>> state = {"model": torch.nn.Linear(3, 2).state_dict(), "step": 0}
>>> dcp.load(state, storage_reader=CheckpointReader("checkpoint", keys=key), no_dist=True)
>>> state["step"]
100
"""

from __future__ import annotations

from fastrack._util.extras import require

require("torch", "fastrack.distributed", "torch")

# ruff: noqa: E402 - after the error that says what to install
from fastrack._util.public import published as _published
from fastrack.distributed._group import SecureGroup
from fastrack.distributed._process_group import init_process_group
from fastrack.distributed._reader import CheckpointReader
from fastrack.distributed._writer import CheckpointWriter

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "SecureGroup",
    "init_process_group",
]

for _name in __all__:
    globals()[_name] = _published(globals()[_name], "fastrack.distributed")  # the path that users import them from
