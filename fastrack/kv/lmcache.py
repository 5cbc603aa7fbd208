"""Sealed blocks in LMCache: an L2 adapter that keeps them in a folder, and a serde for LMCache's own adapters.

Both are named in the JSON of ``lmcache server --l2-adapter``. The adapter says of each block by itself whether it
opened. With the serde, a block that does not open makes a miss of all blocks of its request, as LMCache has it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from fastrack._util.fork import per_process
from fastrack.kv._folder import BlockFolder
from fastrack.kv._hosts import require_version
from fastrack.kv._lmcache_serde import REQUIRED, context_of, layout_of, layout_text, meaning_of  # registers the serde
from fastrack.kv._sealer import BlockContext, BlockSealer
from fastrack.kv._settings import limit_of, settings_of

_SETTINGS = ("folder", "keys", "limit", "workers", *REQUIRED)


class SealedAdapter(L2AdapterInterface):
    """L2 adapter of type ``plugin`` that keeps sealed blocks in a folder, which servers may share.

    Parameters
    ----------
    params : dict
        ``adapter_params``: ``folder``; ``keys``, a key file or a provider, by default ``FASTRACK_KEY_FILE``;
        ``limit``, such as ``"20 GiB"``; ``workers``, threads that work on tasks, 2 by default; and what LMCache's keys
        do not tell: ``edition``, the version of the weights, which has to change where they do under one name;
        ``kv_dtype`` and ``layout`` of the engine's cache; ``hash``, LMCache's ``--hash-algorithm``, and its ``seed``,
        ``PYTHONHASHSEED``.
    l1_memory_desc : object
        Not used.

    Examples
    --------
    >>> import json
    >>> told = {"edition": "2026-11", "kv_dtype": "bfloat16", "layout": "NHD", "hash": "blake3", "seed": "0"}
    >>> adapter = {
    ...     "type": "plugin",
    ...     "module_path": "fastrack.kv.lmcache",
    ...     "class_name": "SealedAdapter",
    ...     "adapter_params": {"folder": "/var/cache/kv", "keys": "kv.key", **told},
    ... }
    >>> command = ["lmcache", "server", "--l2-adapter", json.dumps(adapter)]
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        require_version("LMCache")
        settings = settings_of(params, "adapter_params", _SETTINGS, required=REQUIRED)
        super().__init__()
        limit = limit_of(settings, "adapter_params")
        self.folder = BlockFolder(settings["folder"], settings.get("keys"), threads=1, limit=limit)
        self._meaning = meaning_of(settings)
        self._lock = per_process(self, "_lock", threading.Lock)
        self._last_task = 0
        self._results: dict[int, Any] = {}
        self._layouts: dict[tuple[str, int, int], set[str]] = defaultdict(set)  # `delete` is told only keys
        self._notifiers = [create_event_notifier() for _ in range(3)]
        workers = int(settings.get("workers", 2))
        self._pool = per_process(self, "_pool", partial(ThreadPoolExecutor, workers, "fastrack-kv"))

    def get_store_event_fd(self) -> int:
        return int(self._notifiers[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._notifiers[2].fileno())

    def submit_store_task(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> int:
        def store() -> L2StoreResult:
            stored, are_there = [], True
            for key, block in zip(keys, objects, strict=True):
                context = self._context(key, layout_of(block))
                is_new = not self.folder.has(context)  # LMCache adds up what it is told
                is_there = self.folder.put(context, block.byte_array)
                are_there = are_there and is_there
                if is_there and is_new:
                    stored.append((key, BlockSealer.sealed_size(block.get_size())))
            if stored:
                self._notify_keys_stored(*map(list, zip(*stored, strict=True)))
            return L2StoreResult(are_there, sum(size for _, size in stored))

        return self._submit(0, store, lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done = {task: result for task, result in self._results.items() if isinstance(result, L2StoreResult)}
            for task in done:
                del self._results[task]
        return done

    def submit_lookup_and_lock_task(
        self, keys: Sequence[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc]
    ) -> int:
        def look_up(number: int) -> bool:
            described = group_layout_descs.get(keys[number].object_group_id)
            return described is not None and self.folder.has(
                self._context(keys[number], layout_text(described.shapes, described.dtypes))
            )

        return self._submit_each(1, len(keys), look_up)

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        """Do nothing: a file that vanishes between lookup and load is a miss."""

    def submit_load_task(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> int:
        def load(number: int) -> bool:
            block = objects[number]
            is_open = self.folder.get(self._context(keys[number], layout_of(block)), block.byte_array)
            if is_open:
                self._notify_keys_accessed([keys[number]])
            return is_open

        return self._submit_each(2, len(keys), load)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._results.pop(task_id, None)

    query_load_result = query_lookup_and_lock_result

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            for layout in tuple(self._layouts[key.model_name, key.kv_rank, key.object_group_id]):
                size = self.folder.remove(self._context(key, layout))
                if size:
                    self._notify_keys_deleted([key], [size])

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True, "type": "fastrack", **self.folder.sealer.counts}

    def close(self) -> None:
        self._pool.shutdown()
        for notifier in self._notifiers:
            notifier.close()

    def _context(self, key: ObjectKey, layout: str) -> BlockContext:
        self._layouts[key.model_name, key.kv_rank, key.object_group_id].add(layout)
        return context_of(self._meaning, key, layout)

    def _submit_each(self, notifier: int, count: int, work: Callable[[int], bool]) -> int:
        def each() -> Bitmap:
            found = Bitmap(count)
            for number in range(count):
                if work(number):
                    found.set(number)
            return found

        return self._submit(notifier, each, lambda: Bitmap(count))

    def _submit(self, notifier: int, work: Callable[[], Any], failed: Callable[[], Any]) -> int:
        with self._lock:
            self._last_task = task = self._last_task + 1

        def run() -> None:
            result = failed()
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - of LMCache's listeners, say: its loop waits for a result
                self.folder.sealer.count("failed", f"a task ended with {type(error).__name__}")
            finally:
                with self._lock:
                    self._results[task] = result
                self._notifiers[notifier].notify()

        self._pool.submit(run)
        return task


class StockAdapter(L2AdapterInterface):
    """One of LMCache's own L2 adapters, made by the plug-in, which registers the serde ``fastrack`` before.

    `params` is the configuration of that adapter: ``{"type": "fs", "base_path": ...}``.
    """

    def __new__(cls, params: Mapping[str, Any], l1_memory_desc: Any = None) -> Self:
        config = get_l2_adapter_config_class(params["type"]).from_dict(dict(params))
        adapter: Self = create_l2_adapter(config, l1_memory_desc)
        return adapter
