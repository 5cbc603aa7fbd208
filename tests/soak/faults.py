"""Faults on purpose. Each must give the documented error, zeros in `out=`, and nothing that stays behind."""

import errno
import os
import resource
import signal
import threading
import time

import numpy as np
import torch
from helpers.forking import in_forked_child
from helpers.loading import Numbers, die_on_five
from helpers.tampering import tamper_file, tampered
from torch.utils.data import DataLoader

import fastrack
from fastrack import AuthenticationError, Channel, ClosedError, FormatError, SealedTensor, UnknownKeyError
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, SEALED_CHUNK_SIZE
from soak.worker import KEYS, RING, STRANGER, Violation


def flipped_bit(worker):
    """In the header, the ciphertext or the tag of a message."""
    message, array = worker.sealed(max(1, worker.size()))
    if not array.nbytes:
        return
    size = len(message.message)
    chunk = worker.random.randrange(array.nbytes // CHUNK_SIZE + 1)
    start, stop = HEADER_SIZE + chunk * SEALED_CHUNK_SIZE, min(HEADER_SIZE + (chunk + 1) * SEALED_CHUNK_SIZE, size)
    kind, place, expected = worker.random.choice(
        [
            ("bit in a header", worker.random.randrange(HEADER_SIZE), None),
            ("bit in a chunk", worker.random.randrange(start, stop), chunk),
            ("bit in a tag", worker.random.randrange(stop - 16, stop), chunk),
        ]
    )
    _refused(worker, kind, tampered(message, place), array, expected)


def swapped_chunks(worker):
    message, array = worker.sealed(worker.random.randrange(3, 40) * CHUNK_SIZE)
    one, other = sorted(worker.random.sample(range(array.nbytes // CHUNK_SIZE), 2))
    data = np.frombuffer(bytes(message.message), np.uint8).copy()
    chunks = data[HEADER_SIZE : HEADER_SIZE + SEALED_CHUNK_SIZE * (other + 1)].reshape(-1, SEALED_CHUNK_SIZE)
    chunks[[one, other]] = chunks[[other, one]]
    _refused(worker, "swapped chunks", SealedTensor(message.context, data, message.key_id), array, one)


def wrong_key(worker):
    message, array = worker.sealed()
    with worker.way() as way:
        worker.fault("key not given", lambda: way.to_device(message, keys=STRANGER), UnknownKeyError)
    strange = SealedTensor(message.context, np.frombuffer(message.message, np.uint8), STRANGER.id)
    _refused(worker, "another key", strange, array, None, keys=STRANGER)


def other_message(worker):
    """One of another file, of the same name, dtype and shape."""
    message, array = worker.sealed()
    other = fastrack.seal(array, worker.key(), name=message.name)
    if message.key_id == other.key_id:
        replaced = SealedTensor(message.context, np.frombuffer(other.message, np.uint8), message.key_id)
        _refused(worker, "replaced message", replaced, array, None)


def _refused(worker, kind, message, array, chunk, keys=RING):
    with worker.way() as way:
        out = np.ones_like(array)
        error = worker.fault(kind, lambda: way.to_device(message, keys=keys, out=out), AuthenticationError)
        if out.view(np.uint8).any():
            raise Violation(f"{kind}: out= does not hold zeros")
        if (error.tensor, error.chunk) != (message.name, chunk):
            raise Violation(f"{kind}: chunk {chunk} of {message.name!r} was altered, and {error!r} was raised")
        worker.check(worker.give(way, array), array, "the transfer after a failure")


def altered_file(worker):
    """One tensor is refused, and the others open."""
    arrays = {name: worker.array(max(16, worker.size() // 8)) for name in "ab"}
    path = worker.folder / "f.safetensors"
    fastrack.save_file(arrays, path, worker.key())
    chunk = worker.random.randrange(arrays["a"].nbytes // CHUNK_SIZE + 1)
    tamper_file(path, "a", HEADER_SIZE + SEALED_CHUNK_SIZE * chunk)
    error = worker.fault("altered file", lambda: fastrack.verify_file(path, RING), AuthenticationError)
    assert (error.tensor, error.chunk) == ("a", chunk)
    with fastrack.load_file(path) as file:
        worker.check(_opened(file["b"]), arrays["b"], "the other tensor")
    path.unlink()


def _saved(worker, size):
    """Return the path of a sealed file, and the array in it."""
    path, array = worker.folder / "x.safetensors", worker.array(size)
    fastrack.save_file({"x": array}, path, worker.key())
    return path, array


def _opened(sealed):
    return fastrack.to_device(sealed, keys=RING, framework="numpy")


def truncated_file(worker):
    path, _ = _saved(worker, worker.size() // 8)
    os.truncate(path, worker.random.randrange(path.stat().st_size))
    worker.fault("truncated file", lambda: fastrack.load_file(path), FormatError)
    path.unlink()


def replaced_file(worker):
    """Replace a file: the one that is open stays as it was, and the next opening gives the new one."""
    new, other = worker.array(200_000), worker.folder / "new.safetensors"
    path, old = _saved(worker, 100_000)
    with fastrack.load_file(path) as file:
        fastrack.save_file({"x": new}, other, worker.key())
        worker.injected["replaced file"] += 1
        other.replace(path)
        worker.check(_opened(file["x"]), old, "the old file")
    with fastrack.load_file(path) as file:
        worker.check(_opened(file["x"]), new, "the new file")
    worker.caught["replaced file"] += 1
    path.unlink()


def closed_channel(worker):
    """By another thread, while transfers are under way: each is whole, or refused."""
    channel = Channel(threads=worker.random.choice([1, 2]), keys=KEYS)
    message, array = worker.sealed(2 << 20)
    delay = worker.random.uniform(0, 0.005)
    closer = threading.Thread(target=lambda: (time.sleep(delay), channel.close()))
    closer.start()

    def until_closed():
        for _ in range(100_000):
            out = np.zeros_like(array)
            channel.to_device(message, out=out)
            worker.check(out, array, "a transfer before the end")

    worker.fault("closed channel", until_closed, ClosedError)
    closer.join()


def failing_write(worker):
    """A disk that fills up, by an error from `progress` and by a limit on the size of files in a forked child."""
    (path, old), new = _saved(worker, 50_000), worker.array(3 << 20)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    worker.fault("full disk", lambda: fastrack.save_file({"x": new}, path, KEYS[0], progress=full), OSError)

    def in_child():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            fastrack.save_file({"x": new}, path, KEYS[0])
        except OSError as error:
            return error.errno
        return 0

    worker.injected["file too large"] += 1
    worker.caught["file too large"] += in_forked_child(in_child, 50) == errno.EFBIG
    _holds_one_of(worker, path, old)


def interrupted_save(worker):
    """A process that is killed while it saves: the old file or the new one is there, whole."""
    (path, old), new = _saved(worker, 50_000), worker.array(4 << 20)
    child = os.fork()
    if not child:
        try:
            fastrack.save_file({"x": new}, path, KEYS[0])
        finally:
            os._exit(0)
    time.sleep(worker.random.uniform(0, 0.03))
    worker.injected["killed while saving"] += 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for left in worker.folder.glob(".fastrack-*.part"):  # which nobody can take for the file
        left.unlink()
    _holds_one_of(worker, path, old, new)
    worker.caught["killed while saving"] += 1


def _holds_one_of(worker, path, *arrays):
    fastrack.verify_file(path, RING)
    with fastrack.load_file(path) as file:
        found = _opened(file["x"])
    path.unlink()
    for array in arrays:
        if found.shape == array.shape and found.dtype == array.dtype and found.tobytes() == array.tobytes():
            worker.check(found, array)
            return
    raise Violation("a save that failed left something else under its name")


def killed_loader(worker):
    """A worker process of a data loader is killed: the error comes where its batch would."""
    batches = DataLoader(Numbers(20, die_on_five), num_workers=1, multiprocessing_context="forkserver")
    received = []

    def iterate():
        for batch in fastrack.wrap(batches, prefetch=worker.random.choice([0, 2])):
            received.append(batch[0, 0].item())
            worker.check(batch, torch.tensor([[len(received) - 1, 0]]).numpy(), "a batch before the end")

    # RuntimeError from torch, or what the pipe to a dead process gives while a tensor of it is received.
    worker.fault("killed loader process", iterate, RuntimeError, OSError, EOFError)
    if received != list(range(len(received))) or len(received) > 5:
        raise Violation(f"batches of a killed process: {received}")


LIGHT = {flipped_bit: 8, swapped_chunks: 3, wrong_key: 3, other_message: 2, altered_file: 2, truncated_file: 2}
LIGHT |= {replaced_file: 2, closed_channel: 1, failing_write: 0.5, interrupted_save: 0.5}
HEAVY = {killed_loader: 0.1}
