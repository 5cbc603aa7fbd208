"""Sealed blocks in vLLM's offloading: what leaves the memory of the model is ciphertext, in whatever tier it lies."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from collections.abc import Collection
from typing import Any, ClassVar, cast

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import CanonicalKVCaches, LookupResult, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from fastrack._documents.canonical import encode
from fastrack.format import message_size
from fastrack.kv._hosts import require_version
from fastrack.kv._meaning import BlockMeaning
from fastrack.kv._settings import require_setting
from fastrack.kv._vllm_worker import Epoch, Failures, SealedLoadStoreSpec, SealedWorker

_PLACE = "kv_connector_extra_config"
_SPEC = {"spec_name": "SealedOffloadingSpec", "spec_module_path": "fastrack.kv.vllm"}
_MEDIA = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate")
"""Settings of a server that change what an image becomes. vLLM hashes those of a request alone with the image."""
_NAMESPACE = "fastrack_namespace"  # what the spec gets of the connector, as vLLM gives it no more than the settings


class SealedOffloadingConnector(OffloadingConnector):
    """vLLM's offloading, of blocks that its workers seal before they leave the memory of the model.

    Scheduler, eviction and tiers are vLLM's. The primary tier and all tiers behind it hold ciphertext, and only workers
    have the key. A block that does not open is cleared, told to the scheduler as not loaded, and missed from then on,
    until it is stored again; the model computes it anew, for which ``kv_load_failure_policy`` must be ``"recompute"``.

    Settings in ``kv_connector_extra_config`` beside vLLM's own, such as ``cpu_bytes_to_use`` and ``secondary_tiers``:
    ``keys``, a key file or a provider, by default ``FASTRACK_KEY_FILE``; ``edition``, the version of the weights, of
    those of a draft model too, unless ``load_format="fastrack"`` opened them; ``adapters``, the version of the
    adapters, with ``enable_lora``.

    Where weights change in a running server, nothing is stored or loaded until vLLM resets the cache of its connector
    and of the model's own memory, and nothing from before opens then.

    Examples
    --------
    >>> transfer = {
    ...     "kv_connector": "SealedOffloadingConnector",
    ...     "kv_connector_module_path": "fastrack.kv.vllm",
    ...     "kv_role": "kv_both",
    ...     "kv_load_failure_policy": "recompute",
    ...     "kv_connector_extra_config": {"keys": "kv.key", "edition": "2026-11", "cpu_bytes_to_use": 8 << 30},
    ... }
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        settings = _checked(vllm_config)
        namespace = [*_model_of(vllm_config).values(), platform.machine()]
        settings[_NAMESPACE] = hashlib.sha256(encode(namespace)).hexdigest()[:32]
        super().__init__(vllm_config, role, kv_cache_config)
        self._config, self._caches = vllm_config, kv_cache_config
        self._failures = Failures(set(), set(), set())
        self._has_groups = len(kv_cache_config.kv_cache_groups) > 1  # in which numbers of blocks mean several

    @property
    def worker(self) -> SealedWorker:
        """The worker that seals and opens blocks, in a process of the model."""
        worker = self.connector_worker and self.connector_worker.worker
        assert isinstance(worker, SealedWorker)
        return worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Seal the blocks of these caches from now on."""
        self.connector_worker.spec.meaning = _meaning_of(self._config, self._caches, self.connector_worker.spec.config)
        super().register_kv_caches(kv_caches)

    def build_connector_meta(self, scheduler_output: Any) -> SealedMetadata:
        """Return the jobs of a step, and its epoch."""
        return SealedMetadata(
            **vars(super().build_connector_meta(scheduler_output)), epoch=self.scheduler.manager.epoch
        )

    def bind_connector_metadata(self, connector_metadata: SealedMetadata) -> None:
        """Begin a step, whose blocks are of its epoch."""
        self.worker.note(connector_metadata.epoch)
        super().bind_connector_metadata(connector_metadata)

    def reset_cache(self) -> bool | None:
        """Reset the cache of the tiers, and note whether the model's own memory has no blocks any more either.

        vLLM resets the latter first, but for a server whose requests go on: their blocks may be of older weights.
        """
        was_reset: bool | None = super().reset_cache()
        if self._kv_cache_manager is not None and not self._kv_cache_manager.usage:
            manager = self.scheduler.manager
            manager.epoch = manager.epoch._replace(whole=manager.epoch.resets)
        return was_reset

    def unregister_kv_caches(self) -> None:
        """Let go of the caches, whose memory the server is about to give back."""
        self.worker.release()

    def restore_kv_caches(self) -> None:
        """Seal the blocks of the caches again, which may have other addresses."""
        self.worker.register()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose blocks were loaded, and, if there are several groups, those with bad blocks."""
        results = super().get_transfer_results(finished_req_ids)
        self._failures = self.worker.take_failures()
        if self._has_groups:
            results.failed_recving |= self._failures.requests & results.finished_recving
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the places of the blocks that did not open. vLLM computes them anew."""
        return set() if self._has_groups else self._failures.places

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Return which jobs ended, and the keys of what was not stored or did not open."""
        meta = super().build_connector_worker_meta()
        return meta and SealedWorkerMetadata(meta.completed_jobs, meta.transfer_stats, self._failures.keys)

    def update_connector_output(self, connector_output: Any) -> None:
        """Miss what did not open for any rank from now on, before vLLM ends the jobs."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, SealedWorkerMetadata):
            self.scheduler.manager.failed |= meta.failed
        super().update_connector_output(connector_output)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any) -> Any:
        """Return vLLM's metrics of its tiers."""
        vllm_config.kv_transfer_config.kv_connector_extra_config |= _SPEC
        return super().build_prom_metrics(vllm_config, *arguments)


class SealedConnector(OffloadingConnector):
    """Former connector, which refuses to start and says what took its place: `SealedOffloadingConnector`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        raise ValueError(
            "kv_connector: expected 'SealedOffloadingConnector', got 'SealedConnector', whose place it took. Name it, "
            f"and in {_PLACE} write cpu_bytes_to_use beside keys and edition, and in place of folder, if blocks are to "
            'be files too, "secondary_tiers": [{"type": "fs", "root_dir": FOLDER}]'
        )


@dataclasses.dataclass
class SealedMetadata(OffloadingConnectorMetadata):
    """Jobs of a step, and the epoch of the blocks that it computes."""

    epoch: Epoch = dataclasses.field(kw_only=True)


@dataclasses.dataclass
class SealedWorkerMetadata(OffloadingWorkerMetadata):
    """Jobs that ended, and the keys of chunks with a block that was not stored or did not open, of all ranks."""

    failed: set[bytes] = dataclasses.field(default_factory=set)

    def aggregate(self, other: Any) -> SealedWorkerMetadata:
        """Return those of two ranks."""
        both = super().aggregate(other)
        return SealedWorkerMetadata(both.completed_jobs, both.transfer_stats, self.failed | other.failed)


class SealedManager(TieringOffloadingManager):
    """vLLM's manager of tiers, which misses what did not open, and hands the keys of chunks to the workers.

    Attributes
    ----------
    failed : keys of chunks that are misses until they are stored again
    spoiled : keys of those that were stored again: a tier behind the primary one may have kept what did not open
    epoch : of this scheduler
    """

    failed: set[bytes]
    spoiled: set[bytes]
    epoch: Epoch

    @classmethod
    def take(cls, manager: TieringOffloadingManager) -> SealedManager:
        """Return a manager that vLLM has made, as one of this class: its spec makes it with all its tiers."""
        taken: Any = manager
        taken.failed, taken.spoiled, taken.epoch = set(), set(), Epoch(os.urandom(16).hex())
        taken.__class__ = cls  # last: vLLM 0.33 may have a thread that uses it already
        return cast("SealedManager", taken)

    def lookup(self, key: Any, req_context: ReqContext, **options: Any) -> LookupResult:
        """Look a chunk up. One that did not open would be loaded, and fail, again and again."""
        if key in self.failed:
            return LookupResult.MISS
        if key in self.spoiled:
            return cast("LookupResult", self.primary_tier.lookup(key, req_context))
        return cast("LookupResult", super().lookup(key, req_context, **options))

    def prepare_load(self, keys: Collection[Any], req_context: ReqContext) -> SealedLoadStoreSpec:
        """Return where chunks are, and their keys."""
        return SealedLoadStoreSpec(super().prepare_load(keys, req_context), keys, req_context.req_id, self.epoch)

    def prepare_store(self, keys: Collection[Any], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Return which chunks to store, where, and their keys. Chunks that did not open are stored again."""
        for key in self.failed.intersection(keys):
            self._drop(key)
        output = super().prepare_store(keys, req_context)
        if output is not None:
            output.store_spec = SealedLoadStoreSpec(
                output.store_spec, output.keys_to_store, req_context.req_id, self.epoch
            )
            stored = self.failed.intersection(output.keys_to_store)
            self.failed -= stored
            self.spoiled |= stored
        return output

    def complete_store(self, keys: Collection[Any], req_context: ReqContext, success: bool = True) -> None:
        """End the storing of chunks. Those that a rank could not store are no chunks, in no tier."""
        if failed := self.failed.intersection(keys):
            self.primary_tier.complete_store(failed, req_context, False)
        stored = [key for key in keys if key not in failed]
        super().complete_store(stored, req_context, success and bool(stored))

    def reset_cache(self) -> None:
        """Forget all chunks. What a tier or a late worker still has of them does not open."""
        super().reset_cache()
        self.failed, self.spoiled = set(), set()
        self.epoch = self.epoch._replace(resets=self.epoch.resets + 1)

    def _drop(self, key: bytes) -> None:
        """Remove a chunk from the primary tier, unless it is in use: vLLM would not store over it."""
        primary = self.primary_tier
        chunk = primary._policy.get(key)  # noqa: SLF001 - vLLM removes only what it could not store
        if chunk is not None and chunk.ref_cnt == 0:
            primary._policy.remove(key)  # noqa: SLF001
            primary._num_evictable_cache_chunks -= 1  # noqa: SLF001
            primary._free_chunk(chunk)  # noqa: SLF001


class SealedOffloadingSpec(TieringOffloadingSpec):
    """vLLM's primary tier and the tiers behind it, with room for the header and the tags of each block."""

    is_sealed: ClassVar[bool] = True  # for tiers behind it
    meaning: BlockMeaning  # in a worker
    _worker: SealedWorker | None

    def __init__(self, config: OffloadingConfig) -> None:
        namespace = config.extra_config.get(_NAMESPACE)
        if namespace is None:
            raise ValueError(
                "kv_connector: expected 'SealedOffloadingConnector' for SealedOffloadingSpec, got another, which ends "
                "the server when a block does not open. Name it"
            )
        # A block of one rank is one message: loads begin inside a chunk of several blocks.
        size = config.worker_kv_bytes_per_block
        super().__init__(
            dataclasses.replace(
                config,
                worker_kv_bytes_per_block=message_size(size) if size else 0,
                # Names of files: without a path, which private copies change, and apart for what opens apart.
                model=dataclasses.replace(config.model, name=namespace),
                parallel=dataclasses.replace(config.parallel, is_parallelism_agnostic=False),
            )
        )
        if size and not self.num_chunks:
            raise ValueError(
                f"{_PLACE}: expected cpu_bytes_to_use for a chunk, of {self.kv_bytes_per_chunk} bytes, got "
                f"{self.extra_config['cpu_bytes_to_use']}. Write more"
            )

    def get_manager(self) -> SealedManager:
        """Return the manager of the tiers, in the scheduler's process, which has no key."""
        manager = super().get_manager()
        return manager if isinstance(manager, SealedManager) else SealedManager.take(manager)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> SealedWorker:
        """Return the worker, for these caches from now on. It registers no memory with a device."""
        if self._worker is None:
            self._worker = SealedWorker(self)
        self._worker.register(kv_caches)
        return self._worker


def _checked(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the settings of the connector, with its spec. Raise ValueError for those that let a bad block pass."""
    require_version("vLLM")
    transfer = vllm_config.kv_transfer_config
    settings: dict[str, Any] = transfer.kv_connector_extra_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            "kv_load_failure_policy: expected 'recompute', got another policy, with which a request ends where a "
            "block does not open. Set it"
        )
    if settings.get("sync_load_budget_bytes"):
        raise ValueError(
            "sync_load_budget_bytes: expected 0, got more, with which a request reads blocks before all are open. "
            "Leave it out"
        )
    if settings.get("canonical_layout"):
        raise ValueError(
            "canonical_layout: expected none, got one, with which ranks write parts of one block. Leave it out"
        )
    settings |= _SPEC
    return settings


def _model_of(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return what a meaning has of the model, as all processes of a server know it."""
    settings, model = vllm_config.kv_transfer_config.kv_connector_extra_config, vllm_config.model_config
    load, media = vllm_config.load_config, model.multimodal_config
    sealed = dict(load.model_loader_extra_config).get("file") if load.load_format == "fastrack" else None
    return {
        "model": sealed or model.served_model_name,
        "weights": sealed or require_setting(settings, _PLACE, "edition"),
        "quantization": model.quantization and str(model.quantization),
        "overrides": [str(model.hf_overrides), *(str(getattr(media, name, None)) for name in _MEDIA)],
        "adapter": require_setting(settings, _PLACE, "adapters") if vllm_config.lora_config else None,
    }


def _meaning_of(vllm_config: VllmConfig, caches: Any, config: OffloadingConfig) -> BlockMeaning:
    """Return what decides the bytes of a rank's blocks, besides their tokens and the salt that is hashed with them."""
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    layers = vllm_config.compilation_config.static_forward_context
    backends = {each.get_attn_backend().get_name() for each in layers.values() if hasattr(each, "get_attn_backend")}
    # vLLM orders the keys of a block for the tiles of AMX where the processor has them, in the same shape.
    processor = [platform.machine(), str(getattr(torch.cpu, "_is_amx_tile_supported", bool)())]
    interleaved = [str(getattr(parallel, f"{name}_kv_cache_interleave_size", None)) for name in ("cp", "dcp")]
    sizes = config.parallel
    ranks = {"rank": [sizes.rank, sizes.world_size, sizes.tp_size, sizes.pp_size, sizes.pcp_size, sizes.dcp_size]}
    return BlockMeaning(
        **_model_of(vllm_config),
        dtype=f"{cache.cache_dtype} {model.dtype}",
        layout=str(config.kv_cache_layout),
        page_size=config.cache.tokens_per_hash,
        block_size=config.cache.blocks_per_chunk,
        heads=None,  # in the texts of the groups
        layers=[list(group.layer_names) for group in caches.kv_cache_groups],
        groups=[str(group.kv_cache_spec) for group in caches.kv_cache_groups],
        details=[*processor, *sorted(backends), *interleaved, model.max_model_len],
        ranks={"rank": [0, 1]} if config.replicated_layout else ranks,
        hash=cache.prefix_caching_hash_algo,
        seed=os.environ.get("PYTHONHASHSEED"),
    )
