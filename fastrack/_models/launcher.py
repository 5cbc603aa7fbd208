"""Start a program that opens sealed folders by its own code: ``fastrack run``."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import hashlib
import json
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fastrack._keys.keyring import KeyRing, is_path
from fastrack._keys.keys import Key
from fastrack._models.launched import DESCRIPTION, VARIABLE
from fastrack._models.mounts import Mount
from fastrack._sets.anchor import Anchor
from fastrack._sets.folder import load_folder
from fastrack._util.endings import remove_own
from fastrack._util.rights import make_own, require_own_folder

_HOOK = Path(__file__).parent / "children"  # the folder of a `sitecustomize` and of nothing else
_OF_TERMINALS = {signal.SIGINT, signal.SIGQUIT}
_PASSED = {*_OF_TERMINALS, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_SLOTS = 1000  # launchers of one folder at a time
_IS_ABSENT = "expected a program in PATH, or its path, got neither. Install it, or name its path"
_MAY_NOT_RUN = "expected a program, got what may not be run. Name its interpreter, as in python serve.py, or chmod +x"


class Launcher:
    """Opens sealed folders for the processes of one program, until its block ends. Only on Linux.

    Parameters
    ----------
    sources : sequence of str
        Where its keys are. A provider's name stays a name, which each process asks. A key of standard input or of a
        descriptor, which no grandchild has, is in memory of the launcher.
    blocks : str, optional
        The source of the key of KV blocks. Without one, a random key seals those that no other server reads.
    """

    def __init__(self, sources: Sequence[str], blocks: str | None = None) -> None:
        # A core dump has the keys and what was decrypted. 1 ends those that go to a program, too, which 0 does not.
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (hard if hard in {0, 1} else 1, hard))
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undone:
            undone.push(self._stack)
            self.sources = [self._hold(each) for each in sources]
            self._blocks = {"named": self._hold(blocks)} if blocks else {"random": self._keep(Key.generate())}
            self._ring = KeyRing.resolve(self.sources)
            if blocks:
                KeyRing.resolve(self._blocks["named"])  # refused here, and not when a server stores a block
            undone.pop_all()
        self._slots: list[Path] = []
        self._shown: dict[str, str] = {}  # what the program sees of folders, by their names
        self._unlinked: dict[str, str] = {}

    def mount(
        self,
        folder: str,
        links: Sequence[Path] = (),
        *,
        anchor: Anchor | None = None,
        code: bool = False,
        memfd: Iterable[str] = (),
    ) -> set[str]:
        """Open a sealed folder, and have the program see its private copy, under the paths `links` if there are any.

        Every shard is compared with the index, and every other file is authenticated. Return which globs of `memfd`
        name sealed files of this folder. Raise what `load_folder` and `mount_folder` raise.
        """
        opened = load_folder(folder, self._ring, anchor=anchor)
        for name in opened.sealed_names:
            opened.open(name).close()
        path = opened.path.absolute() if isinstance(opened.path, Path) else opened.path
        place = os.fspath(path)
        slot = self._stack.enter_context(_slot(f"{place}\0{opened.file_id}"))
        at = slot / (path.name or "folder")
        at.mkdir(0o700)
        matched = {each for each in memfd if fnmatch.filter(opened.sealed_names, each)}
        self._stack.enter_context(Mount(opened, self._ring, code=code, memfd=matched, at=at))
        told = {"folder": place, "keys": self.sources, "index": opened.file_id, "blocks": self._blocks}
        (slot / DESCRIPTION).write_text(json.dumps({str(at): told}), encoding="utf-8")
        self._slots.append(slot)
        for link in links:
            self._stack.enter_context(_linked(link, at))
        shown = str(links[0].absolute() if links else at)
        if not links:
            self._unlinked[shown] = folder
        self._shown |= dict.fromkeys((folder.rstrip("/"), place), shown)
        return matched

    def name_in(self, command: Sequence[str]) -> list[str]:
        """Return a command with the private copies in place of the folders: whole words, and what follows a ``=``.

        Raise ValueError if a folder without a link is in none of its words, and so would not be used.
        """
        named = [*command[:1], *(_replaced(word, self._shown) for word in command[1:])]  # no copy is a program
        for shown, folder in self._unlinked.items():
            if not any(shown in word for word in named):
                raise ValueError(
                    f"expected {folder!r:.200} in an argument of the command, got none. Name it there, or as "
                    "FOLDER=PATH with the path that the program reads"
                )
        return named

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a program, pass signals on, and return its exit status, or 128 and the number of what ended it."""
        env = dict(environment)  # of a launcher around this one, too
        for name, own in ((VARIABLE, self._slots), ("PYTHONPATH", [_HOOK])):
            env[name] = os.pathsep.join(filter(None, [*map(str, own), env.get(name)]))
        early: list[int] = []
        process: subprocess.Popen[bytes] | None = None

        def pass_on(number: int, _: object) -> None:
            if process is None:
                early.append(number)
            elif not (number in _OF_TERMINALS and _is_in_foreground(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

        heard = {number for number in _PASSED if signal.getsignal(number) != signal.SIG_IGN}  # `nohup`: the program too
        before = {number: signal.signal(number, pass_on) for number in heard}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, no status could be asked for
        try:
            # With the descriptors that a shell or a supervisor gave to it, such as that of `<(...)`; its own are not.
            options: dict[str, Any] = {"close_fds": False, "preexec_fn": _preparation()}  # which calls C only
            try:
                process = subprocess.Popen(command, env=env, **options)  # noqa: S603
            except (FileNotFoundError, PermissionError) as error:
                advice = _IS_ABSENT if isinstance(error, FileNotFoundError) else _MAY_NOT_RUN
                raise type(error)(error.errno, advice, command[0]) from None
            for number in early:
                pass_on(number, None)
            pid = 0
            while pid != process.pid:  # the first process of a container has the children of others, too
                pid, status = os.wait()
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _hold(self, source: str) -> str:
        """Return a source of the same keys for processes in other folders, and without this one's descriptors."""
        if is_path(source):
            return str(Path(source).expanduser().absolute())
        if source != "-" and not source.startswith("fd:"):
            return source
        descriptor = 0 if source == "-" else int(source[3:])
        key = Key.read(descriptor)
        os.set_inheritable(descriptor, descriptor < 3)  # or the program could read the key of a file again
        return self._keep(key)

    def _keep(self, key: Key) -> str:
        """Copy a key into memory of this process that nothing changes, and return its path for those of this user."""
        descriptor = os.memfd_create("key", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        text = key._format()  # noqa: SLF001 - as `save` writes it
        self._stack.callback(os.close, descriptor)
        os.fchmod(descriptor, 0o400)
        os.write(descriptor, text)
        text[:] = bytes(len(text))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def _slot(told: str) -> Iterator[Path]:
    """Yield an empty folder of this user, whose path is the same at each start, unless another launcher has that one.

    The system lets go of its lock when a launcher ends, however it ends: what killed ones left is removed.
    """
    base = Path(tempfile.gettempdir()).resolve() / f"fastrack-run-{os.geteuid()}"
    try:
        make_own(base)
        require_own_folder(base / "any")
    except OSError as error:  # others may take a name in /tmp
        error.add_note("TMPDIR names the folder for private copies: set it to one of your own")
        raise
    for left in base.iterdir():
        if (lock := _lock(left)) is not None:
            remove_own(left, os.getpid())
            os.close(lock)
    name = hashlib.sha256(os.fsencode(told)).hexdigest()[:16]
    for number in range(_SLOTS):
        path = base / f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
            if (lock := _lock(path)) is not None:
                break
    else:
        raise OSError(errno.EUSERS, os.strerror(errno.EUSERS), str(base))
    try:
        yield path
    finally:
        remove_own(path, os.getpid())
        os.close(lock)


def _lock(path: Path) -> int | None:
    """Return the descriptor of a folder that is locked until it is closed; None if another has it or it is gone."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.lstat()):  # not removed, and made again
            return lock
    os.close(lock)
    return None


@contextlib.contextmanager
def _linked(link: Path, target: Path) -> Iterator[None]:
    """Have a link at a path that a program knows. One that a killed launcher left is replaced, and nothing else."""
    require_own_folder(link)
    there = link.readlink() if link.is_symlink() else None
    if there == target or (there and there.is_relative_to(target.parents[1]) and not there.exists()):
        link.unlink()
    try:
        link.symlink_to(target)
    except OSError as error:  # which names the target
        raise OSError(error.errno, error.strerror, str(link)) from None
    try:
        yield
    finally:
        if link.is_symlink() and link.readlink() == target:
            link.unlink()


def _replaced(word: str, shown: Mapping[str, str]) -> str:
    for start in (0, *(at + 1 for at, char in enumerate(word) if char == "=")):
        for name, path in sorted(shown.items(), reverse=True):  # a folder in another one first
            if f"{word[start:]}/".startswith(f"{name}/"):
                return f"{word[:start]}{path}{word[start + len(name) :]}"
    return word


def _is_in_foreground(child: int) -> bool:
    """Return whether a terminal sends what its keys mean to a child by itself."""
    with contextlib.suppress(OSError), Path("/dev/tty").open("rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp() == os.getpgid(child)
    return False


def _preparation() -> Callable[[], None]:
    """Return what a child calls before its program begins: it is terminated when its launcher ends."""
    library, launcher = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        library.prctl(_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # which has ended already
            os._exit(128 + signal.SIGTERM)

    return prepare
