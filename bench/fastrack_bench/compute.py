"""Compute of the workloads: models of transformers with random weights, timed on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from fastrack._bench.measure import Times
from fastrack_bench.workloads import TOKENS, Case, Compute

_RUNS = 4
_LONG = 3.0  # seconds of a run from which on fewer are timed
_FEWER = 2


def measured_compute(device: str) -> Compute:
    """Return a `Compute` that times requests and training steps of real models on a device."""

    def compute(case: Case) -> Times:
        torch.manual_seed(0)
        model = _build(case.model).to(device)
        inputs: dict[str, Any] = {name: tensor.to(device) for name, tensor in _sample(case).items()}
        run = _training(model, inputs) if case.mode == "training" else _request(model, inputs)
        warm = _timed(run, device)
        return Times([_timed(run, device) for _ in range(_FEWER if warm > _LONG else _RUNS)])

    return compute


def _build(name: str) -> Any:
    """Return a model with random weights, as large as it was published."""
    models = {
        "ResNet-50": (transformers.ResNetForImageClassification, transformers.ResNetConfig, {"num_labels": 1000}),
        "ViT-B": (transformers.ViTForImageClassification, transformers.ViTConfig, {"num_labels": 1000}),
        "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, {}),
    }
    model, config, options = models[name]
    return model(config(**options))


def _sample(case: Case) -> dict[str, Any]:
    """Return random tensors of the case, by the names of the model's arguments."""
    if case.model == "GPT-2":
        tokens = torch.randint(50_257, (case.batch, TOKENS))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return {"pixel_values": torch.randn(case.batch, 3, 224, 224), "labels": torch.randint(1000, (case.batch,))}


def _request(model: Any, inputs: dict[str, Any]) -> Callable[[], Any]:
    model.eval()
    inputs.pop("labels", None)
    if "input_ids" in inputs:
        inputs["logits_to_keep"] = 1  # the scores of only the last token

    def run() -> Any:
        with torch.inference_mode():
            return model(**inputs).logits

    return run


def _training(model: Any, inputs: dict[str, Any]) -> Callable[[], Any]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs.setdefault("labels", inputs.get("input_ids"))

    def run() -> None:
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()

    return run


def _timed(run: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
