"""A model that guesses the next character, on the text of Python's standard library: some modules at each holder.

This file is the training code of the plan: its digest covers it, and holders read it before they join.
"""

import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

MODULES = {"ada": ("argparse.py",), "ben": ("ast.py",), "cleo": ("inspect.py",)}
SIZE = 49  # characters of a window; the model predicts each from the ones before it
BATCH, STEPS, WIDTH = 32, 12, 32


def data_of(name: str) -> dict[str, np.ndarray]:
    """Return the windows of a holder's text, as many as it trains on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = np.frombuffer(b"".join((folder / module).read_bytes() for module in MODULES[name]), np.uint8)
    return {"window": text[: BATCH * STEPS * SIZE].reshape(-1, SIZE).copy()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.guess = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seen, _ = self.memory(self.embed(tokens))
        return self.guess(seen)


def make() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=2e-2)


def first_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model, optimizer = make()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": []}


def train(state: dict[str, Any], shards: Iterator[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Train for one visit. What is not in the state that this returns does not reach the next visit."""
    model, optimizer = make()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses = list(state["losses"])
    for shard in shards:
        for windows in shard["window"].split(BATCH):
            tokens = windows.long()
            guesses = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(guesses.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}


def describe(state: dict[str, Any]) -> str:
    losses = state["losses"]
    return f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps"
