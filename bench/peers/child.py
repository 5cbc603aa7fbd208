"""The process of one peer, its data and its file."""

import ctypes
import gc
import importlib
import os
import shutil
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import numpy as np

TENSORS = 8
MIB = 1 << 20
PAGE = 4096


def serve(pipe, *arguments):
    """Be the process of one peer, and obey commands until the pipe is closed."""
    os.dup2(2, 1)  # whatever a package prints
    worker = Worker(*arguments)
    with suppress(EOFError):
        while True:
            command = pipe.recv()
            try:
                reply = getattr(worker, f"do_{command}")() or {}
            except Exception as error:  # noqa: BLE001 - whatever it is, the table tells it
                reply = {"error": told(error)}
            pipe.send(reply)


class Worker:
    """A peer, its data and its file."""

    def __init__(self, name, size, folder, seed):
        self._name, self._size, self._seed = name, size, seed
        self._path = Path(folder) / name

    def do_start(self):
        from bench.peers.catalog import PEERS

        self._peer = PEERS[self._name]()
        self._arrays = make_arrays(self._size, self._seed)
        self._found = None
        return {"version": version_of(self._peer.package)}

    def do_seal(self):
        remove(self._path)
        seconds = timed(lambda: self._peer.seal(self._arrays, self._path))
        start = time.perf_counter()
        if not self._peer.is_synced:
            sync(self._path)
        return {
            "seconds": seconds,
            "synced": seconds + time.perf_counter() - start,
            "bytes": sum(file.stat().st_size for file in files(self._path)),
        }

    def do_open(self):
        self._found = None
        gc.collect()
        start = time.process_time()
        return {"seconds": timed(self._open), "cpu": time.process_time() - start}

    def do_verify(self):
        """Compare the last opened arrays with the sealed ones."""
        return {"same": same(self._found, self._arrays)}

    def do_forget(self):
        """Drop the opened arrays, so that no peer holds memory while another is measured."""
        self._found = None

    def do_trim(self):
        """Return malloc's free memory, so that new allocations are visible."""
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def do_warm(self):
        """Touch the memory that a run needs, and free it.

        A virtual machine may have to ask its host for memory that it has not used for a while, which takes up to half a
        second for 256 MiB, and falls on the peer that is first.
        """
        np.ones(2 * self._size * MIB, np.uint8)

    def do_flip(self):
        """Change a bit in the middle of the file."""

        def change(path):
            data = np.memmap(path, np.uint8, "r+")
            data[data.size // 2] ^= 1
            data.flush()

        return self._try(change)

    def do_cut(self):
        """Cut a page off the end of the file."""
        return self._try(lambda path: os.truncate(path, path.stat().st_size - PAGE))

    def _try(self, change):
        """Open a copy that was changed, and return the outcome."""
        self._found = None
        other = self._path.with_name(f"{self._path.name}-changed")
        (shutil.copytree if self._path.is_dir() else shutil.copyfile)(self._path, other)
        try:
            change(max(files(other), key=lambda file: (file.stat().st_size, file.name)))
            opened = self._peer.open(other)
            return {"outcome": "not noticed" if same(opened, self._arrays) else "other data came out"}
        except Exception as error:  # noqa: BLE001 - whatever it is, it was noticed
            # Without the folder: it describes this machine, not the peer.
            return {"outcome": "refused", "by": told(error).replace(f"{self._path.parent}/", "")}
        finally:
            remove(other)

    def _open(self):
        self._found = self._peer.open(self._path)
        if self._peer.is_read:
            touch(self._found)


def timed(action):
    """Return the seconds of an action, after garbage was collected."""
    gc.collect()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def version_of(package):
    """Return a package's version, from the module if it runs from a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return importlib.import_module(package).__version__


def make_arrays(size, seed):
    """`size` MiB of normal deviates, as eight matrices of float32."""
    random = np.random.default_rng(seed)
    shape = (size * MIB // TENSORS // PAGE, PAGE // 4)
    return {f"layer.{number}": random.standard_normal(shape, np.float32) for number in range(TENSORS)}


def same(found, arrays):
    """Check that the opened tensors are the sealed ones."""
    return found.keys() == arrays.keys() and all(
        np.array_equal(np.asarray(found[name]).view(np.uint8), array.view(np.uint8)) for name, array in arrays.items()
    )


def touch(arrays):
    """Read a byte of every page, so that all pages are in memory."""
    return sum(int(np.asarray(array).reshape(-1).view(np.uint8)[::PAGE].sum()) for array in arrays.values())


def files(path):
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def sync(path):
    for file in files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sum_of(path, *fields):
    """Sum up lines of a file of proc(5), in bytes."""
    return sum(int(line.split()[1]) << 10 for line in Path(path).read_text().splitlines() if line.startswith(fields))


def told(error):
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__
