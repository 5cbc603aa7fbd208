"""`BlockMeaning`: all that decides what the bytes of a KV block mean, which every door fills and binds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastrack._documents.canonical import encode
from fastrack.kv._sealer import BlockContext


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMeaning:
    """All that decides what the bytes of a KV block mean, as a server has it. A door fills it once, at its start.

    Every member has to be given, so that no door leaves one out in silence. Values are those of JSON. None says that
    the server has no such thing, or that it differs from block to block and is given to `context`.

    Attributes
    ----------
    model : str or None
        Identity of the sealed folder, else the name by which the model is served. A path is refused: it changes with
        each private copy.
    weights : str
        Version of the weights: of a sealed folder its ``file_id``, else the setting ``edition``.
    quantization, overrides, adapter : Any
        What the server makes of these weights: its quantisation, overrides of the configuration, and the content of
        its adapter, for which a name is not enough.
    dtype : str
        Dtype as the cache has it: fp8_e4m3 and fp8_e5m2 are both uint8 in torch.
    layout : str
        Name of the order of dimensions in a block.
    page_size, block_size : int or None
        Tokens of a page or of the server's block, and of what is stored as one block.
    heads, layers, groups : Any
        Heads, layers and groups of layers in a block.
    details : Any
        What else changes the bytes with one server: bytes of a page, tiles of a processor.
    ranks : mapping
        Each rank that holds other bytes, and the number of ranks of each kind.
    hash, seed : str or None
        Function that hashes tokens, and its seed.

    Examples
    --------
    >>> from fastrack.kv._meaning import BlockMeaning
    >>> meaning = BlockMeaning(
    ...     model="llama", weights="2026-11", quantization=None, overrides={}, adapter=None, dtype="fp8_e4m3",
    ...     layout="LBNHC", page_size=16, block_size=64, heads=8, layers=32, groups=None, details=None,
    ...     ranks={"tp": [0, 2], "pp": [0, 1]}, hash="sha256", seed="0",
    ... )  # fmt: skip
    >>> meaning.context(b"tokens", "tenant", group=1).ranks
    '{"group":1,"pp":[0,1],"tp":[0,2]}'
    """

    model: str | None
    weights: str
    quantization: Any
    overrides: Any
    adapter: Any
    dtype: str
    layout: str
    page_size: int | None
    block_size: int | None
    heads: Any
    layers: Any
    groups: Any
    details: Any
    ranks: Mapping[str, Any]
    hash: str | None
    seed: str | None
    _model: str = field(init=False, repr=False, compare=False)
    _layout: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.model is not None and (not self.model or self.model.startswith(("/", "~", "."))):
            got = "a path, which changes with each copy" if self.model else "none"
            raise ValueError(
                f"the meaning of KV blocks: expected the name by which the model is served, got {got}. Start the "
                "server with --served-model-name, or write the setting model where there is one"
            )
        model = ("model", "weights", "quantization", "overrides", "adapter")
        layout = ("dtype", "layout", "page_size", "block_size", "heads", "layers", "groups", "details", "hash", "seed")
        for name, members in (("_model", model), ("_layout", layout)):
            text = encode({member: getattr(self, member) for member in members}).decode()
            object.__setattr__(self, name, text)

    def context(self, tokens_hash: bytes, salt: str = "", **part: Any) -> BlockContext:
        """Return the context of a block: `part` is what differs from block to block, such as its group or rank."""
        return BlockContext(self._model, self._layout, encode({**self.ranks, **part}).decode(), tokens_hash, salt)
