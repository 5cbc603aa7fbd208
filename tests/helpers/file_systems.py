"""File systems that cannot do what others can."""

import errno
import os
import resource
from contextlib import contextmanager

from fastrack._util import atomic


@contextmanager
def full(nbytes=0):
    """Let no file of this process become longer than some bytes for a block, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def answer(patch, **calls):
    """Have `fallocate` and `sync_file_range` of the C library answer as functions do, or be missing for None."""
    for name, call in calls.items():
        patch.setattr(atomic, f"_{name}", call)


def refuse_unnamed(patch):
    """Have files without names be refused, as many file systems do, so that temporary ones have names."""
    given = os.open

    def refuse(path, flags, *args, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return given(path, flags, *args, **options)

    if hasattr(os, "O_TMPFILE"):
        patch.setattr(os, "open", refuse)
