"""Sealed blocks in vLLM: a connector that stores the blocks of prompts in a folder, and takes them from there."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from fastrack._documents.canonical import encode
from fastrack.errors import FormatError
from fastrack.kv._folder import BlockFolder
from fastrack.kv._sealer import BlockContext
from fastrack.kv._settings import settings_of
from fastrack.kv._vllm_blocks import BlockMemory, agree

_SETTINGS = ("folder", "keys", "edition")


@dataclass(slots=True)
class Work(KVConnectorMetadata):
    """The blocks that workers load and store in a step, each with its hash, its tenant's salt and its place."""

    loads: list[tuple[bytes, str, int]] = field(default_factory=list)
    stores: list[tuple[bytes, str, int]] = field(default_factory=list)
    known: int = 0  # steps with blocks that did not open, which the scheduler knows of


@dataclass(slots=True)
class _Prompt:
    request: Any
    places: list[int]
    matched: int = 0  # blocks to load
    first: int = 0  # of them
    stored: int = 0  # blocks that are stored, or were


class SealedConnector(KVConnectorBase_V1):
    """Connector of vLLM that keeps the blocks of prompts sealed in a folder, which several servers may share.

    Settings in ``kv_connector_extra_config``: ``folder``; ``keys``, a key file or a provider, by default
    ``FASTRACK_KEY_FILE``; ``edition``, which has to change where the weights do under one name. The folder of a model
    that ``load_format="fastrack"`` opened is a version by itself.

    A block that does not open is computed anew, for which ``kv_load_failure_policy`` must be ``"recompute"``. Servers
    find each other's blocks if they have the same ``PYTHONHASHSEED``, as vLLM hashes tokens with it.

    Examples
    --------
    >>> transfer = {
    ...     "kv_connector": "SealedConnector",
    ...     "kv_connector_module_path": "fastrack.kv.vllm",
    ...     "kv_role": "kv_both",
    ...     "kv_load_failure_policy": "recompute",
    ...     "kv_connector_extra_config": {"folder": "/var/cache/kv", "keys": "kv.key", "edition": "2026-11"},
    ... }
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = settings_of(transfer.kv_connector_extra_config, "kv_connector_extra_config", _SETTINGS)
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                "kv_load_failure_policy: expected 'recompute', got another policy, with which a request ends where a "
                "block does not open. Set it"
            )
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise FormatError(f"SealedConnector: expected a model with one group of KV caches, got {len(groups)}")
        self.folder = BlockFolder(settings["folder"], settings.get("keys"))
        self._block_size = vllm_config.cache_config.block_size
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        self._ranks = parallel.tensor_parallel_size
        if parallel.pipeline_parallel_size != 1:
            raise FormatError("SealedConnector: expected no pipeline parallelism, got some. Leave it out")
        sealed = dict(vllm_config.load_config.model_loader_extra_config).get("file")
        self._model = encode([model.served_model_name, model.revision, sealed, settings.get("edition")]).decode()
        described = [str(groups[0].kv_cache_spec), vllm_config.cache_config.cache_dtype, str(model.dtype)]
        # vLLM orders the keys of a block for the tiles of AMX where the processor has them, in the same shape.
        described += [platform.machine(), str(getattr(torch.cpu, "_is_amx_tile_supported", bool)())]
        described.append(str(getattr(parallel, "decode_context_parallel_size", 1)))
        self._layout = encode([*described, self._block_size, sorted(groups[0].layer_names)]).decode()
        self._prompts: dict[str, _Prompt] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self._failed: set[int] = set()
        self._failures = 0  # of steps: those that a worker saw, or that the scheduler knows of
        self._block = BlockMemory()

    def _context(self, block: bytes, salt: str, rank: int) -> BlockContext:
        return BlockContext(self._model, self._layout, f"{rank} of {self._ranks}", block, salt)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Count the tokens of leading blocks that the folder has. The last token is always computed."""
        first = num_computed_tokens // self._block_size
        last = (request.num_prompt_tokens - 1) // self._block_size
        salt, matched = request.cache_salt or "", 0
        for block in request.block_hashes[first:last]:
            if not all(self.folder.has(self._context(bytes(block), salt, rank)) for rank in range(self._ranks)):
                break
            matched += 1
        self._prompts[request.request_id] = _Prompt(request, [], matched, first)
        return matched * self._block_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Keep what is to be loaded into the blocks that were allocated."""
        prompt = self._prompts.setdefault(request.request_id, _Prompt(request, []))
        prompt.places = list(blocks.get_block_ids()[0])
        prompt.matched = num_external_tokens // self._block_size

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        """Return the blocks to load before, and to store after, the next step."""
        work = Work(known=self._failures)
        computed = {each.req_id: each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs}
        places = {each.req_id: each.block_ids[0] for each in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            computed[name] = cached.num_computed_tokens[number]
            if (new := cached.new_block_ids[number]) is not None and name in self._prompts:
                known = [] if name in cached.resumed_req_ids else self._prompts[name].places
                places[name] = [*known, *new[0]]
        for name, count in computed.items():
            if (prompt := self._prompts.get(name)) is None:
                continue
            prompt.places = list(places.get(name, prompt.places))
            prompt.stored = min(prompt.stored, count // self._block_size)  # fewer, after blocks that did not open
            hashes, salt = [bytes(each) for each in prompt.request.block_hashes], prompt.request.cache_salt or ""
            for block in range(prompt.first, prompt.first + prompt.matched):
                work.loads.append((hashes[block], salt, prompt.places[block]))
            prompt.stored = max(prompt.stored, prompt.first + prompt.matched)
            prompt.matched = 0
            done = min(count + scheduler_output.num_scheduled_tokens[name], prompt.request.num_prompt_tokens)
            for block in range(prompt.stored, min(done // self._block_size, len(hashes), len(prompt.places))):
                work.stores.append((hashes[block], salt, prompt.places[block]))
                prompt.stored = block + 1
        return work

    def update_connector_output(self, connector_output: Any) -> None:
        """Take note of a step with blocks that did not open. vLLM schedules their requests anew from here on."""
        self._failures += bool(connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request."""
        self._prompts.pop(request.request_id, None)
        return False, None

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Open the blocks of the step into vLLM's cache. What does not open leaves the cache as it was."""
        layers = forward_context.no_compile_layers
        self._caches = {name: layers[name].kv_cache for name in sorted(layers) if hasattr(layers[name], "kv_cache")}
        is_whole, loads = True, self._get_connector_metadata().loads
        for block, salt, place in loads:
            memory, pairs = self._block.pairs(self._caches.values(), place)
            if not self.folder.get(self._context(block, salt, get_tensor_model_parallel_rank()), memory):
                self._failed.add(place)
                is_whole, pairs = False, []
            for part, piece in pairs:
                piece.copy_(part)
        if loads:
            self._failures += not (is_whole if self._ranks == 1 else agree(is_whole))

    def wait_for_save(self) -> None:
        """Seal the blocks that the step completed.

        What follows a block that did not open was computed from other bytes, also in steps that were scheduled
        meanwhile. Nothing is sealed until the scheduler has set the requests back.
        """
        work = self._get_connector_metadata()
        if work.known != self._failures:
            self.folder.sealer.count("doubtful", number=len(work.stores))
            return
        for block, salt, place in work.stores:
            memory, pairs = self._block.pairs(self._caches.values(), place)
            for part, piece in pairs:
                part.copy_(piece)
            self.folder.put(self._context(block, salt, get_tensor_model_parallel_rank()), memory)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the places of blocks that did not open since the last call. vLLM computes them anew."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are opened before the first."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Do nothing: all layers of a block are sealed together, after the last."""
