"""The serde ``fastrack`` of LMCache, which seals blocks for LMCache's own adapters."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import factory
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, SerdeProcessor, Serializer
from lmcache.v1.memory_management import MemoryObj

from fastrack._documents.canonical import encode
from fastrack.errors import AuthenticationError
from fastrack.kv._sealer import BlockContext, BlockSealer
from fastrack.kv._settings import settings_of

SERDE = "fastrack"


class SealedBlocks(Serializer, Deserializer):
    """Serializer and deserializer: of one key and one version of weights."""

    def __init__(self, sealer: BlockSealer, edition: str) -> None:
        self.sealer, self._edition = sealer, edition

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        sizes = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        return self.sealer.sealed_size(sum(shape.numel() * dtype.itemsize for shape, dtype in sizes))

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        return self.sealer.seal(context_of(key, layout_of(src), self._edition), src.byte_array, dst.byte_array)

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        if not self.sealer.open(context_of(key, layout_of(dst), self._edition), src.byte_array, dst.byte_array):
            raise AuthenticationError("a KV block did not open: its request is computed anew")  # LMCache's only miss


def context_of(key: ObjectKey, layout: str, edition: str) -> BlockContext:
    """Return what a block of LMCache is."""
    model = encode([key.model_name, edition]).decode()
    return BlockContext(model, layout, f"{key.kv_rank:#x}.{key.object_group_id}", key.chunk_hash, key.cache_salt)


def layout_of(block: MemoryObj) -> str:
    """Return the shapes and dtypes of a block."""
    return layout_text(block.get_shapes(), block.get_dtypes())


def layout_text(shapes: Sequence[Sequence[int]], dtypes: Sequence[object]) -> str:
    """Return shapes and dtypes as text, which equal ones have in common."""
    return encode([[str(dtype), list(shape)] for shape, dtype in zip(shapes, dtypes, strict=True)]).decode()


def _make_serde(kwargs: dict[str, object]) -> SerdeProcessor:
    settings = settings_of(kwargs, "serde", ("keys", "edition", "max_workers"))
    blocks = SealedBlocks(BlockSealer(settings.get("keys"), threads=1), str(settings.get("edition", "")))
    return AsyncSerdeProcessor(blocks, blocks, max_workers=int(settings.get("max_workers", 1)))


contract = getattr(factory, "SerdeSizeContract", None)  # of versions after 0.5.6: sizes are exact here
factory.register_serde_factory(SERDE, _make_serde, **({"size_contract": contract.EXACT} if contract else {}))
