"""Handwritten digits of scikit-learn, a third at each holder, and a network that tells them apart.

This file is the training code of the plan: its digest covers it, and holders read it before they join.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

HOLDERS = ("ada", "ben", "cleo")
TESTED = 297  # of 1797 samples, which no holder has
BATCH = 32


def data_of(name: str) -> dict[str, np.ndarray]:
    """Return the samples of a holder."""
    images, labels = load_digits(return_X_y=True)
    part = np.arange(TESTED + HOLDERS.index(name), len(images), len(HOLDERS))
    return {"image": images[part].astype(np.float32) / 16, "label": labels[part].astype(np.int64)}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def first_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model, optimizer = make()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "samples": 0}


def train(state: dict[str, Any], shards: Iterator[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Train for one visit. What is not in the state that this returns does not reach the next visit."""
    model, optimizer = make()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    samples = state["samples"]
    for shard in shards:
        for images, labels in zip(shard["image"].split(BATCH), shard["label"].split(BATCH), strict=True):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(labels)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "samples": samples}


@torch.no_grad()
def describe(state: dict[str, Any]) -> str:
    model, _ = make()
    model.load_state_dict(state["model"])
    images, labels = load_digits(return_X_y=True)
    guesses = model(torch.from_numpy(images[:TESTED].astype(np.float32) / 16)).argmax(1).numpy()
    right = 100 * (guesses == labels[:TESTED]).mean()
    return f"{right:.0f}% of {TESTED} digits that no holder has, after {state['samples']} samples"
