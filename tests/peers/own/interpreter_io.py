"""Run Python's own tests of what is read on `fastrack.open_bytes` and its raw file, or on files of the disk."""

import io
import os
import tempfile
from pathlib import Path

import numpy as np
from test import test_io, test_memoryio

import fastrack

SEALS = os.environ["FASTRACK_PEERS_MODE"] == "fastrack"
KEY = fastrack.Key.generate()
# Those of reading; the others write, subclass or ask for what only memory has.
OF_FILES = {"test_raw_file_io", "test_buffered_file_io", "test_readline", "test_readline_nonsizeable", "test_with_open"}
OF_FILES |= {"test_large_file_ops", "test_types_have_dict", "test_read_closed", "test_garbage_collection"}
OF_MEMORY = {"test_read", "test_readinto", "test_readline", "test_readlines", "test_iterator", "test_seek", "test_tell"}
OF_MEMORY |= {"test_flags", "test_relative_seek", "test_overseek", "test_read1", "test_isatty", "test_seekable"}
OF_MEMORY |= {"test_bytes_array", "test_detach", "test_init"}


def reader(data=b"", /, buffering=-1):
    if SEALS:
        file = fastrack.open_bytes(fastrack.seal(np.frombuffer(bytes(data), np.uint8).copy(), KEY, name="bytes"), KEY)
        return file if buffering else file.detach()
    with tempfile.NamedTemporaryFile() as file:  # which is read after it was removed
        Path(file.name).write_bytes(data)
        return Path(file.name).open("rb", buffering)


def raw(data=b"", /):
    return reader(data, 0)


def opened(path, mode="r", buffering=-1, *others, **options):
    """Open a file, by what is tested where only its bytes are read."""
    if not SEALS or mode != "rb" or not isinstance(path, str | os.PathLike) or not Path(path).is_file():
        return open(path, mode, buffering, *others, **options)  # noqa: PTH123 - what the tests replace
    return reader(Path(path).read_bytes(), buffering)


def of(base, names, **fields):
    """Make a class of some tests: a name that is no test hides the others."""
    hidden = {name: None for name in dir(base) if name.startswith("test_") and name not in names}
    return type(base)(base.__name__, (base,), {**hidden, **fields})


constants = {name: getattr(io, name) for name in io.__all__ if not hasattr(test_io.CIOTest, name)}
TestFiles = of(test_io.CIOTest, OF_FILES, **{**constants, "open": staticmethod(opened)})
memory = {"buftype": staticmethod(str.encode)}
TestReader = of(test_memoryio.CBytesIOTest, OF_MEMORY, ioclass=staticmethod(reader), **memory)
TestRaw = of(test_memoryio.CBytesIOTest, OF_MEMORY, ioclass=staticmethod(raw), **memory)
