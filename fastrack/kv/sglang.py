"""Sealed pages in SGLang: a storage backend of HiCache that keeps them in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from fastrack._documents.canonical import encode
from fastrack.kv._folder import BlockFolder
from fastrack.kv._sealer import BlockContext
from fastrack.kv._settings import settings_of

_LOADING = {"backend_name", "module_path", "class_name", "interface_v1"}  # which SGLang itself reads
_SETTINGS = ("folder", "keys", "edition")


class SealedHiCache(HiCacheStorage):
    """Storage backend of HiCache, loaded by ``--hicache-storage-backend dynamic``.

    A page that does not open is a miss. SGLang ends a prefix there, and computes what follows.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
        The model and its ranks, and in ``extra_config`` the settings: ``folder``; ``keys``, a key file or a provider,
        by default ``FASTRACK_KEY_FILE``; ``edition``, which has to change where the weights do under one name.
    kwargs : dict
        Not used.

    Examples
    --------
    >>> extra = {
    ...     "backend_name": "fastrack",
    ...     "module_path": "fastrack.kv.sglang",
    ...     "class_name": "SealedHiCache",
    ...     "folder": "/var/cache/kv",
    ...     "keys": "kv.key",
    ... }
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        given = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in _LOADING}
        settings = settings_of(given, "extra_config", _SETTINGS)
        self.folder = BlockFolder(settings["folder"], settings.get("keys"), threads=1)
        self._model = encode([storage_config.model_name, settings.get("edition")]).decode()
        # Pages of MLA are equal on all tensor-parallel ranks, one of which writes them.
        kinds = ("pp", "dcp") if storage_config.is_mla_model else ("tp", "pp", "attn_cp", "dcp")
        names = [f"{kind}_{part}" for kind in kinds for part in ("rank", "size")]
        self._ranks = encode({name: getattr(storage_config, name) for name in names}).decode()
        self._order = [storage_config.is_page_first_layout, storage_config.should_split_heads]
        self._layouts: set[str] = set()  # of the pages that were seen, as `exists` is told only keys

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Keep the pool of pages in host memory."""
        super().register_mem_pool_host(mem_pool_host)
        self._layout_of(mem_pool_host.get_dummy_flat_data_page())

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Open a page into a tensor of its size and dtype, and return this; None for a miss."""
        if target_location is None or not target_location.is_contiguous():  # nothing says how large the page is
            return None
        page: torch.Tensor = target_location
        return page if self.folder.get(self._context(key, self._layout_of(page)), _bytes(page)) else None

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Open pages, each into its tensor."""
        targets = [None] * len(keys) if target_locations is None else target_locations
        return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Seal a page into a file."""
        value = value.contiguous()
        return self.folder.put(self._context(key, self._layout_of(value)), _bytes(value))

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Seal pages, and return whether all are stored."""
        stored = [self.set(key, value) for key, value in zip(keys, values, strict=True)]
        return all(stored)

    def exists(self, key: str) -> bool:
        """Return whether there is a file for a page."""
        return any(self.folder.has(self._context(key, layout)) for layout in tuple(self._layouts))

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Open pages into the pool in host memory."""
        pages = self._pages_of(keys, host_indices)
        found = [self.get(key, torch.empty_like(page)) for key, page in zip(keys, pages, strict=True)]
        for first, opened in zip(self._firsts(keys, host_indices), found, strict=True):
            if opened is not None:
                self.mem_pool_host.set_from_flat_data_page(first, opened)
        return [opened is not None for opened in found]

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Seal pages of the pool in host memory."""
        pages = self._pages_of(keys, host_indices)
        return [self.set(key, page) for key, page in zip(keys, pages, strict=True)]

    def _firsts(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[int]:
        return [int(index) for index in host_indices[:: self.mem_pool_host.page_size][: len(keys)]]

    def _pages_of(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[torch.Tensor]:
        return [self.mem_pool_host.get_data_page(first, flat=True) for first in self._firsts(keys, host_indices)]

    def _context(self, key: str, layout: str) -> BlockContext:
        return BlockContext(self._model, layout, self._ranks, key.encode())

    def _layout_of(self, page: torch.Tensor) -> str:
        layout = encode([str(page.dtype), page.numel(), *self._order]).decode()
        self._layouts.add(layout)
        return layout


def _bytes(page: torch.Tensor) -> Any:
    return page.reshape(-1).view(torch.uint8).numpy()
