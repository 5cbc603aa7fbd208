"""A small transformer, and its weights in memory that processes share."""

import json
import mmap
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import fastrack

_ALIGNMENT = 64  # bytes, as torch aligns tensors: results may depend on it


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a model, from its ``config.json``."""

    vocabulary: int = 256
    length: int = 128  # tokens, at most
    width: int = 64
    layers: int = 2
    heads: int = 4

    @classmethod
    def from_bytes(cls, data: bytes) -> "Config":
        sizes = json.loads(data)
        return cls(**{name: int(sizes[name]) for name in cls.__slots__})


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


def open_model(
    path: Path, keys: fastrack.KeyRing, memory: int, *, anchor: Path | None = None
) -> tuple[str, dict[str, int]]:
    """Open a sealed folder into a memory file. Return its edition, which is the id of its index, and its config."""
    folder = fastrack.load_folder(path, keys, anchor=anchor)
    config = Config.from_bytes(folder.read("config.json"))  # authentic, and so are the sizes that it claims
    with torch.device("meta"):
        size = _layout(Transformer(config))[1]
    os.ftruncate(memory, size)
    fastrack.load_model(place_model(config, mmap.mmap(memory, size)), folder, keys)
    return folder.file_id, asdict(config)


def map_model(config: Config, memory: int) -> Transformer:
    """Return a model whose weights are those in a memory file, which no process can change any more."""
    # Private, since older kernels refuse a shared map of sealed memory. Pages that nobody writes to are shared anyway.
    size = os.fstat(memory).st_size
    return place_model(config, mmap.mmap(memory, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))


def place_model(config: Config, memory: mmap.mmap) -> Transformer:
    """Return a model whose weights lie in a map, which lives as long as one of them does."""
    with torch.device("meta"):
        model = Transformer(config)
    state, places = model.state_dict(), _layout(model)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # as it is meant
        placed = {
            name: torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=places[name]).view(like.shape)
            for name, like in state.items()
        }
    model.load_state_dict(placed, assign=True)
    return model.requires_grad_(requires_grad=False).eval()


def _layout(model: Transformer) -> tuple[dict[str, int], int]:
    """Return where each tensor begins, and the size of all."""
    places, size = {}, 0
    for name, tensor in model.state_dict().items():
        places[name] = size
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, size
