"""Training code of tours in NVFlare: dropout, shuffled rows and Adam, whose state travels. A test may have it fail."""

import os
from pathlib import Path

import torch

FAULT = "FASTRACK_TEST_FAULT"  # a file that says so, as the plan names this function


def first_state():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        weights = _model().state_dict()
        zeros = [{name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2)]
        return {"model": weights, "optimizer": {"moments": zeros, "steps": 0}, "rng": torch.get_rng_state()}


def train(state, shards):
    fault = Path(os.environ.get(FAULT, "/none"))
    if fault.exists():
        _fail(fault, shards)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as another number of them adds up in another order
    try:
        with torch.random.fork_rng():
            return _train(state, shards)
    finally:
        torch.set_num_threads(threads)


def _fail(fault, shards):
    row = next(shards)["x"][0].tolist()
    if fault.read_text() == "die":
        fault.unlink()  # which shows that it came here
        os._exit(1)
    raise ValueError(f"row {row}")


def _train(state, shards):
    model = _model()
    model.load_state_dict(state["model"])
    moments, steps = [dict(each) for each in state["optimizer"]["moments"]], state["optimizer"]["steps"]
    torch.set_rng_state(state["rng"])
    for shard in shards:
        for rows in torch.randperm(len(shard["x"])).split(8):
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(shard["x"][rows]), shard["y"][rows]).backward()
            steps += 1
            _step(model, moments, steps)
    return {
        "model": model.state_dict(),
        "optimizer": {"moments": moments, "steps": steps},
        "rng": torch.get_rng_state(),
    }


@torch.no_grad()
def _step(model, moments, steps):
    """Make a step of Adam (Kingma and Ba, algorithm 1). The one of torch imports a compiler first, for seconds."""
    first, second = moments
    for name, weight in model.named_parameters():
        first[name] = 0.9 * first[name] + 0.1 * weight.grad
        second[name] = 0.999 * second[name] + 0.001 * weight.grad**2
        scale = (second[name] / (1 - 0.999**steps)).sqrt() + 1e-8
        weight.sub_(0.01 * first[name] / (1 - 0.9**steps) / scale)


def _model():
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.25), torch.nn.Linear(32, 2)
    return torch.nn.Sequential(*layers)
