"""Sealed pages in SGLang: a storage backend of HiCache that keeps them in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from fastrack.errors import FormatError
from fastrack.kv._folder import BlockFolder
from fastrack.kv._hosts import require_version
from fastrack.kv._meaning import BlockMeaning
from fastrack.kv._sealer import BlockContext
from fastrack.kv._settings import limit_of, require_setting, settings_of

_LOADING = {"backend_name", "module_path", "class_name", "interface_v1"}  # which SGLang itself reads
_SETTINGS = ("folder", "keys", "limit", "edition", "kv_dtype")
_HEADS = ("head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "head_group_num")
_LAYERS = ("layer_num", "target_layer_num", "start_layer", "end_layer")


class SealedHiCache(HiCacheStorage):
    """Storage backend of HiCache, loaded by ``--hicache-storage-backend dynamic``.

    A page that does not open is a miss. SGLang ends a prefix there, and computes what follows.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
        The model and its ranks, and in ``extra_config`` the settings: ``folder``; ``keys``, a key file or a provider,
        by default ``FASTRACK_KEY_FILE``; ``limit``, such as ``"20 GiB"``; ``edition``, the version of the weights,
        which is required and has to change where they do under one name; ``kv_dtype``, which is required for fp8 from
        SGLang 0.5.23 on.
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
    ...     "edition": "2026-11",
    ... }
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        require_version("SGLang")
        given = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in _LOADING}
        self._settings = settings_of(given, "extra_config", _SETTINGS, required=("edition",))
        self._config = storage_config
        self.folder = BlockFolder(given["folder"], given.get("keys"), threads=1, limit=limit_of(given, "extra_config"))
        self._meaning: BlockMeaning

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Keep the pool of pages in host memory, and take from it how they are laid out."""
        super().register_mem_pool_host(mem_pool_host)
        page, config = mem_pool_host.get_dummy_flat_data_page(), self._config
        if not page.numel():
            raise self._of_several_pools("a pool without keys and values")
        # The pool of the GPU has the dtype of the cache, that of the host bytes for either kind of fp8. From 0.5.23 on
        # only the latter is known.
        dtype = str(getattr(getattr(mem_pool_host, "device_pool", None), "dtype", page.dtype))
        if dtype == "torch.uint8":
            dtype = require_setting(self._settings, "extra_config", "kv_dtype")
        dcp = getattr(config, "dcp_size", 1)  # from 0.5.23 on
        # Pages of MLA are equal on all tensor-parallel ranks, one of which writes them.
        ranks: dict[str, list[int]] = {} if config.is_mla_model else {"tp": [config.tp_rank, config.tp_size]}
        ranks |= {"pp": [config.pp_rank, config.pp_size], "attn_cp": [config.attn_cp_rank, config.attn_cp_size]}
        if dcp > 1:
            ranks |= {"dcp": [config.dcp_rank, dcp], "dcp_tp": [config.tp_size]}
        self._meaning = BlockMeaning(
            model=config.model_name or "",
            weights=str(self._settings["edition"]),
            quantization=None,  # of the weights, whose version it changes
            overrides=None,
            adapter=None,  # its id is in the hash, and is another one after each start
            dtype=dtype,
            layout=mem_pool_host.layout,
            page_size=mem_pool_host.page_size,
            block_size=getattr(config, "logical_page_size", None),
            heads={name: getattr(mem_pool_host, name, None) for name in _HEADS},
            layers={name: getattr(mem_pool_host, name, None) for name in _LAYERS},
            groups=None,  # of one pool
            details=[str(page.dtype), page.numel(), config.should_split_heads, config.tp_lcm_size],
            ranks=ranks,
            hash="sha256",  # the only one of SGLang, and without a seed
            seed=None,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse pools beside that of keys and values: SGLang would ask for theirs by methods that are not here."""
        if str(host_pool_name) != "kv":
            raise self._of_several_pools(str(host_pool_name))

    @staticmethod
    def _of_several_pools(got: str) -> FormatError:
        return FormatError(
            f"SealedHiCache: expected a model with one pool of keys and values, got {got}. Serve it without "
            "--hicache-storage-backend"
        )

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Open a page into a tensor of its size and dtype, and return this; None for a miss."""
        if target_location is None or not target_location.is_contiguous():  # nothing says how large the page is
            return None
        page: torch.Tensor = target_location
        return page if self.folder.get(self._context(key), _bytes(page)) else None

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Open pages, each into its tensor."""
        targets = [None] * len(keys) if target_locations is None else target_locations
        return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Seal a page into a file."""
        value = value.contiguous()
        return self.folder.put(self._context(key), _bytes(value))

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Seal pages, and return whether all are stored."""
        stored = [self.set(key, value) for key, value in zip(keys, values, strict=True)]
        return all(stored)

    def exists(self, key: str) -> bool:
        """Return whether there is a file for a page."""
        return self.folder.has(self._context(key))

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

    def _context(self, key: str) -> BlockContext:
        return self._meaning.context(key.encode())


def _bytes(page: torch.Tensor) -> Any:
    return page.reshape(-1).view(torch.uint8).numpy()
