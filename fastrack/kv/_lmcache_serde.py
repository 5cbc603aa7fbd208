"""The serde ``fastrack`` of LMCache, which seals blocks for LMCache's own adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import factory
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, SerdeProcessor, Serializer
from lmcache.v1.memory_management import MemoryObj

from fastrack._documents.canonical import encode
from fastrack.errors import AuthenticationError
from fastrack.kv._hosts import require_version
from fastrack.kv._meaning import BlockMeaning
from fastrack.kv._sealer import BlockContext, BlockSealer
from fastrack.kv._settings import settings_of

SERDE = "fastrack"
# LMCache's keys have none of these. It learns dtypes with the first block only, and there a byte is either kind of fp8.
REQUIRED = ("edition", "kv_dtype", "layout", "hash", "seed")


class SealedBlocks(Serializer, Deserializer):
    """Serializer and deserializer: of one key and one meaning of blocks."""

    def __init__(self, sealer: BlockSealer, meaning: BlockMeaning) -> None:
        self.sealer, self._meaning = sealer, meaning

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        sizes = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        return self.sealer.sealed_size(sum(shape.numel() * dtype.itemsize for shape, dtype in sizes))

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        return self.sealer.seal(context_of(self._meaning, key, layout_of(src)), src.byte_array, dst.byte_array)

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        if not self.sealer.open(context_of(self._meaning, key, layout_of(dst)), src.byte_array, dst.byte_array):
            raise AuthenticationError("a KV block did not open: its request is computed anew")  # LMCache's only miss


def meaning_of(settings: Mapping[str, Any]) -> BlockMeaning:
    """Return the meaning of LMCache's blocks: what settings tell, beside what each key and block does."""
    told = {name: str(settings[name]) for name in REQUIRED}
    absent = ("quantization", "overrides", "adapter", "page_size", "block_size", "heads", "layers", "groups", "details")
    return BlockMeaning(
        model=None,
        weights=told["edition"],
        dtype=told["kv_dtype"],
        layout=told["layout"],
        ranks={},
        hash=told["hash"],
        seed=told["seed"],
        **dict.fromkeys(absent),
    )


def context_of(meaning: BlockMeaning, key: ObjectKey, layout: str) -> BlockContext:
    """Return what a block of LMCache is."""
    return meaning.context(
        key.chunk_hash,
        key.cache_salt,
        model=key.model_name,
        rank=f"{key.kv_rank:#x}",
        group=key.object_group_id,
        layout=layout,
    )


def layout_of(block: MemoryObj) -> str:
    """Return the shapes and dtypes of a block."""
    return layout_text(block.get_shapes(), block.get_dtypes())


def layout_text(shapes: Sequence[Sequence[int]], dtypes: Sequence[object]) -> str:
    """Return shapes and dtypes as text, which equal ones have in common."""
    return encode([[str(dtype), list(shape)] for shape, dtype in zip(shapes, dtypes, strict=True)]).decode()


def _make_serde(kwargs: dict[str, object]) -> SerdeProcessor:
    require_version("LMCache")
    settings = settings_of(kwargs, "serde", ("keys", *REQUIRED, "max_workers"), required=REQUIRED)
    blocks = SealedBlocks(BlockSealer(settings.get("keys"), threads=1), meaning_of(settings))
    return AsyncSerdeProcessor(blocks, blocks, max_workers=int(settings.get("max_workers", 1)))


contract = getattr(factory, "SerdeSizeContract", None)  # of versions after 0.5.6: sizes are exact here
factory.register_serde_factory(SERDE, _make_serde, **({"size_contract": contract.EXACT} if contract else {}))
