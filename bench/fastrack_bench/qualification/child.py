"""Commands of fastrack in processes that end with this one, one of them where there is no room."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_NEW_USER_AND_MOUNTS = 0x10020000  # CLONE_NEWUSER, CLONE_NEWNS of linux/sched.h
_ROOM = 64 << 10  # bytes


def start(*words: str, full: tuple[str, Path] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command.

    With a folder that is to be `full`, "mounted" small or "limited", it prints last how that was done, None if it may
    not be, and what is left there.
    """
    program = f"from {__name__} import main; main({os.getpid()}, {full and (full[0], str(full[1]))!r})"
    command = [sys.executable, "-c", program, *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)  # noqa: S603


def main(parent: int, full: tuple[str, str] | None) -> None:
    """Run the command line, until the parent ends."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        sys.exit(1)
    place = None if full is None else _PLACES[full[0]](full[1])
    try:
        if full is None or place is not None:
            from fastrack._cli import main as run

            run()
    finally:
        if full is not None:
            sys.stdout.write(json.dumps([place, [path.name for path in Path(full[1]).iterdir()]]))


def _mount_small(folder: str) -> str | None:
    """Mount a small tmpfs that only this process sees, and return its name; None if it may not."""
    libc, user, group = ctypes.CDLL(None), os.geteuid(), os.getegid()
    if libc.unshare(_NEW_USER_AND_MOUNTS):
        return None
    try:
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")  # else files would be another user's
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError:
        return None
    return None if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=%d" % _ROOM) else "a tmpfs of 64 KiB"


def _limit_files(_: str) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM, _ROOM))
    return "files of at most 64 KiB"


_PLACES = {"mounted": _mount_small, "limited": _limit_files}
