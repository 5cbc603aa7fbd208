"""Models to train, from a small ResNet to the size of GPT-2, in plain torch on random data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ResNetSpec:
    """A residual network on images of 32 x 32 pixels: a stage of `blocks` basic blocks for each of `widths`."""

    name: str
    batch: int  # images of a rank in each iteration
    blocks: int
    widths: tuple[int, ...]

    def build(self) -> nn.Module:
        """Return the network, with random weights."""
        first, layers, before = self.widths[0], [], self.widths[0]
        for width in self.widths:
            for index in range(self.blocks):
                stride = 2 if index == 0 and width != first else 1
                layers.append(_Block(before, width, stride))
                before = width
        stem = [nn.Conv2d(3, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU()]
        return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))

    def sample(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random images and their classes."""
        images = torch.randn(self.batch, 3, 32, 32, generator=generator)
        return images, torch.randint(10, (self.batch,), generator=generator)


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """A decoder with the architecture of GPT-2. The embedding of tokens is the output layer as well."""

    name: str
    batch: int  # sequences of a rank in each iteration
    tokens: int  # in a sequence
    layers: int
    width: int
    heads: int
    vocabulary: int = 50_257
    context: int = 1024

    def build(self) -> nn.Module:
        """Return the decoder, with random weights."""
        return _Decoder(self)

    def sample(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random sequences and the tokens that follow."""
        text = torch.randint(self.vocabulary, (self.batch, self.tokens + 1), generator=generator)
        return text[:, :-1], text[:, 1:].flatten()


Spec = ResNetSpec | TransformerSpec

SPECS: tuple[Spec, ...] = (
    ResNetSpec("ResNet-20", 16, 3, (16, 32, 64)),
    ResNetSpec("ResNet-18", 4, 2, (64, 128, 256, 512)),
    TransformerSpec("GPT-2 small", 1, 64, 12, 768, 12),
)


class _Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = before == width and stride == 1
        self.skip: nn.Module = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(images) + self.skip(images))


class _Decoder(nn.Module):
    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocabulary, spec.width)
        self.places = nn.Embedding(spec.context, spec.width)
        layer = nn.TransformerEncoderLayer(
            spec.width, spec.heads, 4 * spec.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(spec.width)
        self.layers = nn.TransformerEncoder(layer, spec.layers, norm, enable_nested_tensor=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        hidden = self.tokens(text) + self.places.weight[:length]
        hidden = self.layers(hidden, nn.Transformer.generate_square_subsequent_mask(length), is_causal=True)
        logits: torch.Tensor = functional.linear(hidden, self.tokens.weight)
        return logits.flatten(0, 1)
