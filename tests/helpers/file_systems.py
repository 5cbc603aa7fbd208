"""File systems that cannot do what others can."""

import errno
import os


def refuse_unnamed(patch):
    """Have files without names be refused, as many file systems do, so that temporary ones have names."""
    given = os.open

    def refuse(path, flags, *args, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return given(path, flags, *args, **options)

    if hasattr(os, "O_TMPFILE"):
        patch.setattr(os, "open", refuse)
