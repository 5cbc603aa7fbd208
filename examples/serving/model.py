"""A small transformer of this example."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from examples.serving.refusals import RefusedError


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a model, from its ``config.json``."""

    vocabulary: int = 256
    length: int = 128  # tokens, at most
    width: int = 64
    layers: int = 2
    heads: int = 4


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.mix = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(self.norm_1(x)).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(0, 1).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """A model that guesses the next token: of a row of tokens it returns the logits after the last."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        # `make_model` fills both: random numbers on the meta device take torch three seconds of imports.
        self.tokens = nn.Parameter(torch.zeros(config.vocabulary, config.width))
        self.places = nn.Parameter(torch.zeros(config.length, config.width))
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.vocabulary)

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens[tokens] + self.places[: len(tokens)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[-1]))

    def takes(self, tokens: torch.Tensor) -> bool:
        """Return whether these are tokens of this model. An index out of range would be an error of torch."""
        is_in_range = (tokens >= 0) & (tokens < self.config.vocabulary)
        return 0 < len(tokens) <= self.config.length and bool(is_in_range.all())

    def write(self, text: str) -> str:
        raise RefusedError("text")


def make_model(folder: Path, config: Config, seed: int) -> Transformer:
    """Write a model of random weights to a new folder, and return it."""
    torch.manual_seed(seed)
    model = Transformer(config)
    for parameter in (model.tokens, model.places):
        nn.init.normal_(parameter)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return model.eval()
