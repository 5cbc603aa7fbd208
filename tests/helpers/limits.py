"""Limits of the code, each with one name for all tests, which set it so that small input or a short wait meets it."""

from contextlib import contextmanager
from importlib import import_module

import pytest

# A limit that several modules read stands in each of them.
_PLACES = {
    # Files and folders
    "file_slab": ("_files.writer:SLAB", "_files.unseal_file:SLAB"),
    "file_header": ("_sealed.file_header:HEADER_LIMIT",),
    "verified_run": ("_files.verify:_VERIFY_RUN",),
    "mapped_files": ("_sealed.storage:MAP_LIMIT",),
    "quantised_piece": ("_sets.quantize:_PIECE",),
    "manifest_size": ("_sets.manifest:_LIMIT",),
    "history": tuple(
        f"{module}:HISTORY_LIMIT"
        for module in ("_sets.publish", "_sets.manifest", "_sets.anchor", "tour._folder", "tour._owner", "tour._visit")
    ),
    # Tables
    "longest_cell": ("_samples.table_files:LONGEST_CELL",),
    "import_mib": ("_cli.commands.import_:_MIB",),
    "arrow_block": ("_samples.csv.csv_arrow:_BLOCK",),
    "arrow_rows": ("_samples.csv.csv_arrow:_ROWS",),
    "arrow_worth": ("_samples.csv.csv_arrow:_WORTH",),
    # Keys
    "derived_together": ("_crypto.derivation:_BATCH",),
    "message_keys_kept": ("_crypto.message_keys:LIMIT",),
    "keys_kept": ("_keys.keyring:CACHE_SIZE",),
    # Loading and training
    "read_ahead": ("_transfer.prefetch:_AHEAD",),
    "batches_ahead": ("_training.prefetch:_AHEAD",),
    "prefetch_end": ("_training.prefetch:_EXIT_TIMEOUT",),
    "preemption_poll": ("_training.checkpoints.preemption:_POLL",),
    "rehearsed_bytes": ("_protect.rehearsal:_MOST_KEPT",),
    "generations": ("_models.generations:_MOST",),
    # GPUs
    "link_calls": ("_devices.cuda.link:_MOST_CALLS",),
    "link_chunks": ("_devices.cuda.link:_MOST_CHUNKS",),
    "link_pause": ("_devices.cuda.link:_LONGEST_PAUSE",),
    "states_together": ("_devices.cuda.buffers:_PER_ALLOCATION",),
    "verdicts_read": ("_devices.cuda.buffers:_READ_EVERY",),
    "small_copy": ("_devices.cuda.driver:SMALL",),
    "large_copy": ("_devices.cuda.driver:LARGE",),
    "copies_measured": ("_devices.cuda.host_memory:_SECONDS",),
    "recorder_memory": ("_devices.cuda.recorder:_OWN",),
    "group_slab": ("distributed._messages:SLAB_CHUNKS",),
    # Servers, asked
    "attempts": ("_remote.retries:ATTEMPTS",),
    "first_delay": ("_remote.retries:_FIRST_DELAY",),
    "answer_time": ("_remote.http:_TIMEOUT",),
    "reason_time": ("_remote.http:_REASON_TIME",),
    "slowest_answer": ("_net.connections:SLOWEST",),
    "requests_at_once": ("_remote.remote_file:PARALLEL",),
    "request": ("_remote.remote_file:_REQUEST",),
    "longest_request": ("_remote.remote_file:_LONGEST",),
    "block_step": ("_remote.blocks:_STEP",),
    "cache_touch": ("_remote.cache:_TOUCH_AFTER",),
    # Servers, run
    "journal_patience": ("_service.journal:_PATIENCE",),
    "addresses": ("_service.limits:_MOST_ADDRESSES",),
    "open_challenges": ("attest._broker.ledger:_OPEN_LIMIT",),
    "tour_files": ("tour._visit:FILES_LIMIT",),
    "tour_grants": ("tour._messages:_GRANTS",),
    # The command line
    "bar_delay": ("_cli.console:_DELAY",),
    "engine_timing": ("_cli.commands.selftest:_TIMING",),
    "demo_noticed": ("_cli.commands.demo:_NOTICED",),
}


@contextmanager
def limited(**values):
    """Set limits for a block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            for place in _PLACES[name]:
                module, constant = place.split(":")
                patch.setattr(import_module(f"fastrack.{module}"), constant, value)
        yield
