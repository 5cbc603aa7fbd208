"""Quantise the weights of a model's linear layers while it is sealed, by the library compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.writer import Progress, describe_scales
from fastrack._sealed.scales import Scale
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._util.extras import require
from fastrack._util.shown import shown
from fastrack.errors import FormatError

_Read = Callable[[int, int], Bytes]
_KINDS = {"fp8": ("float", "F8_E4M3"), "int8": ("int", "I8")}
_WEIGHTS = ("BF16", "F16", "F32", "F64")
_LEAST = 128  # rows and columns, below which scales and errors weigh more than the bytes that are saved
_PIECE = 8 << 20  # bytes of a weight that are float32 at a time
# Weights of two dimensions that are no linear layer's, or that results depend on most: embeddings, which heads may be
# tied to, norms, heads, routers of experts, and adapters.
_OTHERS = re.compile(
    r".*(embed|norm|lora_).*|(.*\.)?(wte|wpe|shared|lm_head|head|output|decoder|classifier|score|gate|router)\.weight",
    re.DOTALL,
)


class Quantizer:
    """Quantisation of weights to values of 8 bits, with a scale for each row.

    Values and scales are computed when they are written, so that one weight at a time is in memory. `count` says how
    many weights were quantised.
    """

    def __init__(self, kind: str) -> None:
        if kind not in _KINDS:
            raise ValueError(f"quantize=: expected one of {', '.join(_KINDS)}, got {shown(kind, 40)}. Give one of them")
        for package in ("torch", "compressed_tensors"):
            require(package, f"quantize={kind!r}", "quantize")
        from compressed_tensors.quantization import QuantizationArgs

        number, self._dtype = _KINDS[kind]
        self._options = QuantizationArgs(num_bits=8, type=number, strategy="channel", symmetric=True)
        self.count = 0

    def split(
        self, tensors: Mapping[str, PlainTensor], progress: Progress | None
    ) -> tuple[dict[str, PlainTensor], dict[str, Scale]]:
        """Return tensors with values and scales in the place of linear layers' weights, and which belong together."""
        found: dict[str, PlainTensor] = {}
        scales: dict[str, str] = {}
        for name, tensor in tensors.items():
            if not _is_linear(name, tensor):
                found[name] = tensor
                continue
            scales[name] = scale = f"{name}_scale"
            if scale in tensors:
                raise FormatError(f"{name!r:.200}: expected no {scale!r:.200} beside a weight to quantise, got one")
            saved = tensor.nbytes - dtypes.nbytes(self._dtype, tensor.shape) - 4 * tensor.shape[0]
            values, rows = partial(self._values, name, tensor, progress, saved), partial(self._scales, name, tensor)
            found[name] = PlainTensor(self._dtype, tensor.shape, values)
            found[scale] = PlainTensor("F32", (tensor.shape[0], 1), rows)
        self.count += len(scales)
        return found, describe_scales(found, scales)

    def _values(self, name: str, tensor: PlainTensor, progress: Progress | None, saved: int) -> _Read:
        import torch
        from compressed_tensors.quantization import quantize

        dtype, start = dtypes.to_torch(self._dtype), 0
        memory = arrays.empty_bytes(dtypes.nbytes(self._dtype, tensor.shape))
        values = torch.from_numpy(memory)
        for piece in _pieces(tensor):
            found = quantize(piece, *self._parameters(name, piece), self._options, dtype=dtype)
            values[start : start + found.numel()] = found.reshape(-1).view(torch.uint8)
            start += found.numel()
        if progress is not None:
            progress(saved)  # of the bytes of the weight, so that all are counted
        return arrays.reader(memory)

    def _scales(self, name: str, tensor: PlainTensor) -> _Read:
        import torch

        return arrays.reader(torch.cat([self._parameters(name, piece)[0] for piece in _pieces(tensor)]))

    def _parameters(self, name: str, piece: Any) -> tuple[Any, Any]:
        """Return the scales and the zero points of rows."""
        import torch
        from compressed_tensors.quantization.utils import calculate_qparams

        scales, zeros = calculate_qparams(*torch.aminmax(piece, dim=1, keepdim=True), self._options)
        if not torch.isfinite(scales).all():
            raise FormatError(
                f"{name!r:.200}: expected finite weights to quantise, got others. Seal the model without quantize="
            )
        return scales, zeros


def _is_linear(name: str, tensor: PlainTensor) -> bool:
    return (
        name.endswith(".weight")
        and _OTHERS.fullmatch(name.lower()) is None
        and tensor.dtype in _WEIGHTS
        and len(tensor.shape) == 2
        and min(tensor.shape) >= _LEAST
    )


def _pieces(tensor: PlainTensor) -> Iterator[Any]:
    """Yield the rows of a weight as float32."""
    memory = tensor.load()(0, tensor.nbytes)
    rows, columns = tensor.shape
    width = tensor.nbytes // rows
    step = max(1, _PIECE // width)
    for start in range(0, rows, step):
        part = np.array(memory[start * width : (start + step) * width])  # mapped memory is not writable: torch warns
        yield arrays.from_bytes(part, tensor.dtype, (part.size // width, columns), "torch").float()
