"""Sealed blocks as a secondary tier of vLLM's offloading: a folder behind the primary tier in host memory."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from fastrack._keys.keys import Key
from fastrack._util.fork import per_process
from fastrack.kv._folder import SUFFIX, BlockFolder
from fastrack.kv._hosts import require_version
from fastrack.kv._meaning import BlockMeaning
from fastrack.kv._sealer import BlockContext, BlockSealer, view_of
from fastrack.kv._settings import limit_of, require_setting


class SealedTier(SecondaryTierManager):
    """Secondary tier that keeps sealed blocks in a folder, which several servers may share.

    A block that does not open is a miss, by itself: the others of its job are hits. The primary tier is plaintext in
    the memory of the host, and a file of ``/dev/shm`` that only this user may read. That of `SealedOffloadingConnector`
    is sealed: its blocks are stored as they are, and this tier needs no key and no edition.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector
        As vLLM gives them.
    folder : str
        The folder.
    keys : str, optional
        A key file or a provider, by default ``FASTRACK_KEY_FILE``.
    limit : int or str, optional
        Bytes of the folder, such as ``"20 GiB"``, above which the blocks used least recently make room.
    edition : str
        The version of the weights, which is required and has to change where these do under one name.
    model : str, optional
        A name of the model, where vLLM has a path.
    workers : int
        Threads that work on jobs.

    Examples
    --------
    >>> tier = {
    ...     "type": "SealedTier",
    ...     "module_path": "fastrack.kv.vllm_tier",
    ...     "folder": "/var/cache/kv",
    ...     "keys": "kv.key",
    ...     "edition": "2026-11",
    ... }
    >>> settings = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        folder: str,
        keys: str | None = None,
        limit: int | str | None = None,
        edition: str = "",
        model: str | None = None,
        workers: int = 2,
    ) -> None:
        require_version("vLLM")
        # Of blocks that workers have sealed, their contexts have the version.
        is_sealed = getattr(offloading_spec, "is_sealed", False)
        weights = "" if is_sealed else require_setting({"edition": edition}, "secondary_tiers", "edition")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        limit = limit_of({"limit": limit}, "secondary_tiers")
        self.folder = _SealedRows(folder, limit) if is_sealed else BlockFolder(folder, keys, threads=1, limit=limit)
        self._meaning = self._described(offloading_spec, model, weights)
        self._pool = per_process(self, "_pool", partial(ThreadPoolExecutor, workers, "fastrack-kv"))
        self._lock = per_process(self, "_lock", threading.Lock)
        self._running: set[Future[None]] = set()
        self._finished: list[JobResult] = []
        self._failed: set[bytes] = set()  # of which the folder may still have files, which vLLM would ask for for ever

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Return whether there is a file for a block: a few calls of the file system."""
        with self._lock:
            is_failed = key in self._failed
        return LookupResult.HIT if not is_failed and self.folder.has(self._context(key)) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Seal blocks of the primary tier into files."""
        with self._lock:
            self._failed.difference_update(job_metadata.keys)
        self._submit(job_metadata, self.folder.put)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Open files into blocks of the primary tier."""
        self._submit(job_metadata, self.folder.get)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call, each with the blocks that opened."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        """Return whether a job runs, or waits to be asked for."""
        with self._lock:
            return bool(self._running or self._finished)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return no preference."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait for all jobs."""
        with self._lock:
            running = set(self._running)
        wait(running)

    def shutdown(self) -> None:
        """Wait for all jobs, and end the threads."""
        self._pool.shutdown()

    def _described(self, spec: Any, model: str | None, weights: str) -> BlockMeaning:
        config, mapper = spec.config, FileMapper.from_offloading_spec("", spec)
        fields = dict(mapper.fields)
        return BlockMeaning(
            model=model or fields.pop("model_name"),
            weights=weights,
            quantization=None,  # of the weights, whose version it changes, as overrides do
            overrides=None,
            adapter=None,  # in the hash
            dtype=fields.pop("dtype"),
            layout=str(config.kv_cache_layout),
            page_size=fields.pop("tokens_per_hash"),
            block_size=self.block_size_bytes,
            heads=None,  # in the size of a block
            layers=None,
            groups=fields.pop("kv_cache_groups"),
            details={name: value for name, value in fields.items() if name != "model_name"},
            ranks={"rank": mapper.rank},
            hash=None,  # no object tells the tier: another function or seed gives other hashes
            seed=None,
        )

    def _context(self, key: bytes) -> BlockContext:
        return self._meaning.context(bytes(get_offload_block_hash(key)), group=get_offload_group_idx(key))

    def _submit(self, job: TransferJob, move: Callable[[BlockContext, memoryview], bool]) -> None:
        keys, places = list(job.keys), [int(place) for place in job.chunk_ids]

        def run() -> None:
            start, moved = time.monotonic(), []
            try:
                blocks = self._primary_kv_view.cast("B")
                for key, place in zip(keys, places, strict=True):
                    first = place * self.block_size_bytes
                    if move(self._context(key), blocks[first : first + self.block_size_bytes]):
                        moved.append(key)
            except Exception as error:  # noqa: BLE001 - the scheduler waits for a result
                self.folder.sealer.count("failed", f"a job ended with {type(error).__name__}")
            taken, size = time.monotonic() - start, len(moved) * self.block_size_bytes
            is_done = len(moved) == len(keys)
            result = JobResult(job.job_id, is_done, None if is_done else moved, taken, size)
            with self._lock:
                if job.is_promotion:
                    self._failed.update(set(keys) - set(moved))
                self._finished.append(result)

        future = self._pool.submit(run)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._running.discard(future)


class _SealedRows(BlockFolder):
    """Rows of a primary tier that workers have sealed, as they are, under names that tell the hash of their tokens."""

    def __init__(self, path: str, limit: int | None) -> None:
        super().__init__(
            path, Key.generate(), limit=limit
        )  # seals nothing: the scheduler's process has no key of the blocks
        self.sealer = _AsTheyAre(self.sealer.key)

    def _name(self, context: BlockContext) -> str:
        return hashlib.sha256(context.encode()).hexdigest() + SUFFIX


class _AsTheyAre(BlockSealer):
    @staticmethod
    def sealed_size(nbytes: int) -> int:
        return nbytes

    def seal(self, context: BlockContext, block: Any, target: Any) -> int:
        view_of(target, writable=True)[:] = view_of(block)
        return view_of(block).size

    def open(self, context: BlockContext, message: Any, target: Any) -> bool:
        return bool(self.seal(context, message, target))
