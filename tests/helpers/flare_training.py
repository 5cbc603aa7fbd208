"""Training code of tours in NVFlare: dropout, shuffled rows and Adam, whose state travels; and code that fails."""

import os

import torch
import torch._dynamo  # which optimizers import at their first step; sites import this module side by side


def first_state():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model, optimizer = _make()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}


def train(state, shards):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as another number of them adds up in another order
    try:
        with torch.random.fork_rng():
            return _train(state, shards)
    finally:
        torch.set_num_threads(threads)


def fail(_, shards):
    raise ValueError(f"row {next(shards)['x'][0].tolist()}")


def die(_, shards):
    next(shards)
    os._exit(1)


def _train(state, shards):
    model, optimizer = _make()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    for shard in shards:
        for rows in torch.randperm(len(shard["x"])).split(8):
            loss = torch.nn.functional.cross_entropy(model(shard["x"][rows]), shard["y"][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}


def _make():
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.25), torch.nn.Linear(32, 2)
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)
