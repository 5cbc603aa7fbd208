"""Tests of the AEAD engine of this machine against OpenSSL, and of its GPU against the host."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastrack._crypto import engine as engines
from fastrack._crypto.cobblestone import MessageKey, chunk_nonce
from fastrack._keys.keys import Key
from fastrack._sealed.seal import seal, unseal
from fastrack._sealed.tensor import SealedTensor
from fastrack._transfer.channel import Channel
from fastrack.errors import AuthenticationError, DeviceError, FastrackError
from fastrack.format import HEADER_SIZE, SEALED_CHUNK_SIZE, ciphertext_size

_SIZE = 1 << 20
_TIMING = 0.2  # seconds for each of the two timings


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The result of the test of the engine. Speeds are of one thread, in 1e9 bytes a second."""

    engine: str | None  # None if no engine is usable
    forced: bool  # True if FASTRACK_ENGINE named it
    fault: str | None  # why it is not the fastest one
    available: tuple[str, ...]
    threads: int
    seal_gbps: float | None
    open_gbps: float | None
    problem: str | None  # None if the test passed


@dataclass(frozen=True, slots=True)
class CudaCheck:
    """The result of the test of the first GPU. `problem` is the reason that it is not usable."""

    usable: bool
    problem: str | None
    kernels: str | None = None  # who compiled them, and why what comes with fastrack was not used
    copies: Any = None  # `CopySpeeds`, in confidential mode


def check_engine(engine: Any = None) -> EngineCheck:
    """Seal 1 MiB, open it with OpenSSL and with the engine, and check that a flipped bit is refused."""
    import numpy as np

    try:
        choice = engines.selected_engine()
        engine = engine or engines.get_engine(threads=1)
    except DeviceError as error:
        return EngineCheck(None, False, None, engines.available_engines(), 0, None, None, str(error))
    key = MessageKey.raw(os.urandom(32), os.urandom(12))
    plain = np.frombuffer(os.urandom(_SIZE), np.uint8)
    sealed, opened = np.empty(ciphertext_size(_SIZE), np.uint8), np.empty(_SIZE, np.uint8)
    schedule = engine.expand_key(key)
    try:
        engine.seal_run(schedule, plain, sealed, 0)
        problem = _compare(engine, schedule, key, plain, sealed, opened)
        seal_gbps = open_gbps = None
        if problem is None:
            seal_gbps = _speed(lambda: engine.seal_run(schedule, plain, sealed, 0))
            open_gbps = _speed(lambda: engine.open_run(schedule, sealed, opened, 0))
    finally:
        schedule.wipe()
        key.wipe()
    threads = engines.get_engine().threads
    return EngineCheck(
        engine.name, choice.forced, choice.fault, engines.available_engines(), threads, seal_gbps, open_gbps, problem
    )


def check_cuda() -> CudaCheck:
    """Open 1 MiB on the first GPU, seal it there, open it on the host, and check that a flipped bit is refused."""
    import numpy as np

    key = Key.generate()
    plain = np.frombuffer(os.urandom(_SIZE), np.uint8)
    sealed = seal(plain, key)
    message = np.frombuffer(sealed.message, np.uint8).copy()
    message[_SIZE // 2] ^= 1
    problem = "it opens a chunk that was altered"
    forged, kernels = False, None
    try:
        with Channel("cuda", keys=key) as channel:
            device = channel._device  # noqa: SLF001 - what follows is no part of a device in general
            kernels, speeds = getattr(device, "compiled_by", None), getattr(device, "copy_speeds", None)
            back = channel.to_host(channel.to_device(sealed), key=key)
            if not np.array_equal(unseal(back, key, framework="numpy"), plain):
                return CudaCheck(usable=False, problem="it returned other bytes than it was given", kernels=kernels)
            forged = True
            channel.to_device(SealedTensor(sealed.context, message, key.id))
    except AuthenticationError as error:
        if forged and error.chunk == (_SIZE // 2 - HEADER_SIZE) // SEALED_CHUNK_SIZE:
            return CudaCheck(usable=True, problem=None, kernels=kernels, copies=speeds)
        problem = str(error)
    except FastrackError as error:
        problem = str(error)
    finally:
        key.wipe()
    return CudaCheck(usable=False, problem=problem, kernels=kernels)


def _compare(engine: Any, schedule: Any, key: Any, plain: Any, sealed: Any, opened: Any) -> str | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher, data = AESGCM(bytes(key.key)), sealed.tobytes()
    try:
        reference = b"".join(
            cipher.decrypt(chunk_nonce(key.nonce, chunk), data[start : start + SEALED_CHUNK_SIZE], None)
            for chunk, start in enumerate(range(0, len(data), SEALED_CHUNK_SIZE))
        )
    except InvalidTag:
        return "OpenSSL refuses what it sealed"
    if reference != plain.tobytes():
        return "OpenSSL opens what it sealed to something else"
    if engine.open_run(schedule, sealed, opened, 0) is not None or opened.tobytes() != reference:
        return "it does not open what it sealed"
    forged = sealed.copy()
    forged[_SIZE // 2] ^= 1
    if engine.open_run(schedule, forged, opened, 0) is None:
        return "it opens a chunk that was altered"
    return None


def _speed(run: Callable[[], object]) -> float:
    """Return the speed of the best run, so that other load on the machine counts least."""
    best = float("inf")
    begin = time.perf_counter()
    while time.perf_counter() - begin < _TIMING:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return _SIZE / best / 1e9
