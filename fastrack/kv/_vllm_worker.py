"""The worker of vLLM's offloading that seals blocks of a rank's caches, and the chunks that it is told of."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from importlib import import_module
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.worker.gpu_worker import Worker

from fastrack._crypto.engine import get_engine
from fastrack._devices.paged.base import PagedBlock, Pages, Piece
from fastrack._devices.paged.host import HostPages
from fastrack._patches.attributes import replace
from fastrack._tensors.arrays import Bytes, empty_bytes
from fastrack.errors import DeviceError, FormatError
from fastrack.format import message_size
from fastrack.kv._meaning import BlockMeaning
from fastrack.kv._paged import PagedSealer
from fastrack.kv._sealer import BlockContext
from fastrack.kv._settings import block_key


class Epoch(NamedTuple):
    """A mark of chunks, which open only until their scheduler's cache is reset."""

    origin: str  # the scheduler's own mark
    resets: int = 0  # of its cache
    whole: int = 0  # the last of these with which the model's own memory was empty


class SealedLoadStoreSpec(CPULoadStoreSpec):
    """Chunks of the primary tier, with what workers bind their blocks to.

    Attributes
    ----------
    keys : of the chunks, each the hash of its tokens and the number of its group
    request : the request that they are loaded for
    epoch : of the scheduler
    """

    def __init__(self, chunks: CPULoadStoreSpec, keys: Collection[bytes], request: str, epoch: Epoch) -> None:
        super().__init__(chunks.block_ids.tolist())
        self.keys, self.request, self.epoch = [bytes(key) for key in keys], request, epoch


class Failures(NamedTuple):
    """Blocks that a rank could not store or open: their places, requests that waited for them, keys of their chunks."""

    places: set[int]
    requests: set[str]
    keys: set[bytes]


class _Job(NamedTuple):
    future: Future[list[bool]]
    blocks: Sequence[PagedBlock]
    keys: Sequence[bytes]
    request: str | None  # None for a store
    size: int
    start: float


class SealedWorker(OffloadingWorker):
    """Seals blocks of a rank's caches into the primary tier, and opens them from there.

    Each block is a message, at the place of its rank and its number in the row of its chunk. The tier is shared memory
    that is registered with no device.
    """

    def __init__(self, spec: Any) -> None:
        settings = spec.extra_config
        self._spec = spec
        self._key = block_key(settings.get("keys"), is_shared=bool(settings.get("secondary_tiers")))
        rank = 0 if spec.replicated_layout else spec.config.parallel.rank  # of equal blocks the first rank's are stored
        self._first = rank * spec.cpu_page_size_per_worker
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._memory: Bytes = self._region.base_tensor.numpy().view("uint8")
        self._caches: CanonicalKVCaches | None = None
        self._paged: PagedSealer | None = None
        self._sizes: Sequence[int] = ()
        self._jobs: dict[int, _Job] = {}
        self._failures = Failures(set(), set(), set())
        self._resets = self._resets_needed = 0
        _watch_weights(self)

    def register(self, caches: CanonicalKVCaches | None = None) -> None:
        """Seal the blocks of these caches from now on; without any, those of before, at the addresses of now."""
        self.release()
        self._caches = caches or self._caches
        pages = pages_of(self._caches)
        self._sizes, room = pages.sizes(), self._spec.config.worker_kv_bytes_per_block
        if message_size(max(self._sizes)) > room:
            pages.close()
            raise FormatError(
                f"SealedOffloadingConnector: expected blocks whose messages fit {room} bytes, as the first rank's do, "
                f"got {message_size(max(self._sizes))}. Give all ranks as many layers"
            )
        self._paged = PagedSealer(pages, self._key)

    def release(self) -> None:
        """Wait for all jobs, and let go of the caches."""
        wait([job.future for job in self._jobs.values()])
        if self._paged is not None:
            self._paged.close()
        self._paged = None

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Seal blocks, once the model's work so far is done."""
        return self._submit(job_id, dst_spec, src_spec, None)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        """Open blocks, once the model's work so far is done."""
        return self._submit(job_id, src_spec, dst_spec, src_spec.request)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended. For vLLM all are successes: `take_failures` has the blocks that failed."""
        results = []
        for number, job in [(number, job) for number, job in self._jobs.items() if job.future.done()]:
            del self._jobs[number]
            for is_done, block, key in zip(job.future.result(), job.blocks, job.keys, strict=True):
                if not is_done:
                    self._failures.keys.add(key)
                    if job.request is not None:
                        self._failures.places.add(block.number)
                        self._failures.requests.add(job.request)
            results.append(TransferResult(number, True, job.size, time.monotonic() - job.start))
        return results

    def take_failures(self) -> Failures:
        """Return the failures of the jobs that `get_finished` returned since the last call."""
        failures, self._failures = self._failures, Failures(set(), set(), set())
        return failures

    def wait(self, job_ids: set[int]) -> None:
        """Wait for jobs, after which their blocks may be overwritten."""
        wait([self._jobs[number].future for number in job_ids if number in self._jobs])

    def shutdown(self) -> None:
        """Wait for all jobs, and release the memory of the tier."""
        self.release()
        self._jobs.clear()
        self._memory = empty_bytes(0)
        self._region.cleanup()

    def note(self, epoch: Epoch) -> None:
        """Note the epoch of a step, whose blocks may be stored in a later one."""
        self._resets = max(self._resets, epoch.resets)

    def require_reset(self) -> None:
        """Store and load nothing until vLLM resets the cache of its connector: the weights change.

        Blocks of old weights may be on their way, in requests that go on and in the cache of the model's own memory, so
        that only a reset counts with which neither has any.
        """
        self._resets_needed = self._resets + 1

    def _submit(self, job_id: int, chunks: SealedLoadStoreSpec, pages: GPULoadStoreSpec, request: str | None) -> bool:
        start, (origin, resets, whole) = time.monotonic(), chunks.epoch
        self.note(chunks.epoch)
        blocks, keys, contexts, messages = [], [], [], []
        for block, chunk, part in self._parts(chunks, pages):
            blocks.append(block)
            keys.append(key := chunks.keys[chunk])
            contexts.append(self._context(key, part, [origin, resets] if resets else None))
            place = int(chunks.block_ids[chunk]) * self._spec.kv_bytes_per_chunk + self._first
            place += part * self._spec.config.worker_kv_bytes_per_block
            messages.append(self._memory[place : place + message_size(self._sizes[block.group])])
        if self._paged is None or whole < self._resets_needed:
            future: Future[list[bool]] = Future()
            future.set_result([False] * len(blocks))
        else:
            move = self._paged.store if request is None else self._paged.load
            future = move(contexts, blocks, messages)
        size = sum(self._sizes[block.group] for block in blocks)
        self._jobs[job_id] = _Job(future, blocks, keys, request, size, start)
        return True

    def _parts(self, chunks: SealedLoadStoreSpec, pages: GPULoadStoreSpec) -> Iterator[tuple[PagedBlock, int, int]]:
        """Yield each block with the number of its chunk in the job, and its own in the chunk.

        The blocks of a group follow each other, in consecutive chunks, and may begin and end inside of one.
        """
        numbers, each, chunk = iter(pages.block_ids.tolist()), self._spec.blocks_per_chunk, 0
        for group, (count, index) in enumerate(zip(pages.group_sizes, pages.block_indices, strict=True)):
            first = index % each
            for part in range(first, first + count):
                yield PagedBlock(group, next(numbers)), chunk + part // each, part % each
            chunk += -(-(first + count) // each) if count else 0
        if chunk != len(chunks.keys):
            raise FormatError(f"blocks of vLLM: expected those of {len(chunks.keys)} chunks, got those of {chunk}")

    def _context(self, key: Any, part: int, epoch: list[Any] | None) -> BlockContext:
        meaning: BlockMeaning = self._spec.meaning
        group = get_offload_group_idx(key)
        return meaning.context(bytes(get_offload_block_hash(key)), group=group, part=part, epoch=epoch)


def pages_of(caches: CanonicalKVCaches) -> Pages:
    """Return the blocks of a rank's caches, on the device that they are on."""
    arrays = [each.tensor for each in caches.tensors]
    groups = [
        [Piece(array.data_ptr(), array.stride(0) * array.element_size(), ref.page_size_bytes) for ref, array in pairs]
        for pairs in ([(ref, arrays[ref.tensor_idx]) for ref in refs] for refs in caches.group_data_refs)
    ]
    device, *others = {array.device for array in arrays}
    if device.type == "cpu" and not others:
        return HostPages(groups, get_engine())
    if device.type == "cuda" and not others:
        first = arrays[0][0]  # blocks of several layers, or with padding, are no contiguous array, but each page is one
        pages: Pages = import_module("fastrack._devices.paged.cuda").CudaPages.on(str(device), groups, first)
        return pages
    got = ", ".join(sorted(map(str, [device, *others])))
    raise DeviceError(
        f"SealedOffloadingConnector: expected KV caches in host memory or on one CUDA device, got them on {got}. "
        "Leave it out, or use fastrack.kv.lmcache for blocks that are in host memory already"
    )


def _watch_weights(worker: SealedWorker) -> None:
    """Have a worker know when vLLM changes the weights of its model, with or without a reset of the connector.

    So does an adapter that is loaded in place: hashes have its name and path.
    """
    watching = weakref.ref(worker)
    for name in ("reload_weights", "update_weights", "add_lora"):
        _watch(name, watching)


def _watch(name: str, watching: weakref.ref[SealedWorker]) -> None:
    @functools.wraps(getattr(Worker, name))
    def changed(self: Any, *arguments: Any, **options: Any) -> Any:
        is_change = name != "add_lora" or any(
            getattr(each, "load_inplace", False) for each in (*arguments, *options.values())
        )
        if is_change and (worker := watching()) is not None:
            worker.require_reset()
        return old(self, *arguments, **options)

    old = replace(Worker, name, changed)
