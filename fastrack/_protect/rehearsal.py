"""`rehearse_save`: save once before the first step, and refuse what would not be sealed, or cannot be."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import secrets
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastrack._protect.refusals import ADVICE
from fastrack._protect.sealing import open_sealed
from fastrack._util.endings import remove_own
from fastrack._util.public import public
from fastrack._util.rights import require_own
from fastrack._util.trial import Trial, current, trial_of
from fastrack.errors import FastrackError

# What trainers write beside tensors: configurations, tokenizers, histories of losses. It is let through unencrypted, as
# other programs read it, and shows what it says: names, hyperparameters, vocabularies, losses.
_SUFFIXES = "csv jinja json jsonl lock log md model py tmp toml txt yaml yml"
_TEXT = {"", *(f".{each}" for each in _SUFFIXES.split())}
_SENTENCE_PIECE = b"\n"  # how the only binary format of tokenizers begins, which is no pickle, zip or .npy
_MOST_KEPT = 64 << 20  # bytes of a text that is put back
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_SEEN = frozenset({"open", "os.link", "os.remove", "os.rename", "os.truncate"})
_CAREFUL = {"fastrack", "tempfile"}  # whose files are sealed, or get their name afterwards
_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - a new folder of mode 0700, under a random name

_watch: contextvars.ContextVar[_Watch | None] = contextvars.ContextVar("fastrack_rehearsal", default=None)


@public
def rehearse_save(save: Callable[[str], object]) -> None:
    """Save a first time before the first step, and refuse a save that would write plaintext, or that fails.

    For training loops of your own; `protect_checkpoints` does it for the Trainers of transformers and Lightning. The
    save goes to an empty folder in memory, where sealed files have no content, so it takes no room. Files that it seals
    elsewhere go nowhere, and what it writes of text there is put back. Random states and optimizers are as before when
    it ends.

    Parameters
    ----------
    save : callable
        Called with the path of a folder, as text; it saves there what the loop saves. If processes of a group train
        together, each of them calls `rehearse_save`.

    Raises
    ------
    FastrackError
        If a file is neither sealed nor text, or if Python opens another file for writing than those of the folder, or
        removes or renames one that was there before.
    ValueError
        If `save` writes no file, or if an optimizer takes a step that has taken some before.

    Examples
    --------
    >>> import torch
    >>> import fastrack
    >>> fastrack.protect_checkpoints(fastrack.Key.generate())  # doctest: +SKIP
    >>> module = torch.nn.Linear(3, 2)
    >>> fastrack.rehearse_save(lambda folder: torch.save(module.state_dict(), f"{folder}/a.pt"))  # doctest: +SKIP
    """
    rehearse(save)


@public
def is_rehearsing() -> bool:
    """Return whether this thread or task rehearses a save, so that a callback can leave out what cannot be tried.

    Examples
    --------
    >>> import fastrack
    >>> fastrack.is_rehearsing()
    False
    """
    return current() is not None


def rehearse(save: Callable[[str], object], *roots: Any, elsewhere: bool = False) -> None:
    """Rehearse a save, and put the attributes of `roots` back as well. It may store all `elsewhere`, as to a server."""
    from fastrack._protect.unchanged import unchanged  # deferred, as torch is

    folder, process = _make_folder(), os.getpid()
    watch = _Watch(folder)
    try:
        with unchanged(*roots), _trying(folder, watch) as trial:
            save(str(folder))
        has_sealed = any(_together(trial.has_sealed))  # when all processes have written
        if not (has_files := watch.judge()) and not elsewhere:
            raise ValueError("rehearsing a save failed: expected files in the given folder, got none. Save there")
        plain = sorted({path for of_process in _together(watch.plain) for path in of_process})
    finally:
        if os.getpid() == process:  # and no child that was forked in the save: the parent may still write
            remove_own(folder, process)  # another process of this machine may remove it too
            watch.put_back()  # last, as it may raise
    if plain:
        raise _refusal(plain[0], f"expected only sealed files and text, got {len(plain)} unencrypted. {ADVICE}")
    if not has_files and not has_sealed:
        warnings.warn(
            "rehearsing a save: expected something sealed, got neither that nor a file, so what the run stores "
            "elsewhere could not be looked at. See that nothing leaves the process that is not sealed",
            stacklevel=2,
        )


@contextlib.contextmanager
def _trying(folder: Path, watch: _Watch) -> Iterator[Trial]:
    """Have what this thread or task seals be only tried, and what it opens be watched, in the block."""
    trial = Trial(folder)
    _hook()
    tried, watched = trial_of.set(trial), _watch.set(watch)
    try:
        watch.is_on = True
        yield trial
    finally:
        watch.is_on = trial.is_on = False  # for tasks that began in the save, too
        _watch.reset(watched)
        trial_of.reset(tried)


class _Watch:
    """Files that a rehearsed save opens for writing, those of them that are plain, and what there was before."""

    def __init__(self, folder: Path) -> None:
        self._inside = os.path.realpath(folder) + os.sep
        self._opened: set[str] = set()
        self._before: dict[str, _Text | None] = {}  # of files elsewhere; None for those that were not there
        self.is_on = False
        self.plain: set[str] = set()

    def see_opened(self, path: Any, mode: Any, flags: Any, caller: str) -> None:
        """Refuse to open a file for writing that would not be looked at, before a byte is in it."""
        if not isinstance(path, str | bytes | os.PathLike) or not isinstance(flags, int) or not flags & _WRITES:
            return
        name = os.fsdecode(path)
        # Of `os.open`, which has no mode, Python does not tell `dir_fd`: a file of each open folder may be meant.
        for folder in ["", *([] if mode is not None or Path(name).is_absolute() else _open_folders())]:
            self._see_written(os.path.realpath(Path(folder, name)), flags, caller)

    def _see_written(self, name: str, flags: int, caller: str) -> None:
        if name.startswith(self._inside) or _is_device(name):
            return
        self._opened.add(name)
        is_text = Path(name).suffix in _TEXT and not Path(name).is_dir()  # which opens a file without a name
        if not is_text and caller not in _CAREFUL:
            self.plain.add(name)  # the save may ignore the error
            raise _refusal(name, "expected to write only into the given folder, got another file. Save there")
        if not flags & os.O_APPEND:  # logs stay
            self._keep(name)

    def see_changed(self, name: str) -> None:
        """Refuse to change a file that was there before the rehearsal, unless it can be put back."""
        if not name.startswith(self._inside):
            self._keep(name)

    def see_removed(self, name: str) -> None:
        """Look at a file before it is gone. Its name says nothing: it may be a temporary one, of text."""
        self.see_changed(name)
        if name in self._opened or name.startswith(self._inside):
            self._judge(name, _is_text)

    def see_named(self, name: str) -> None:
        """Look at the end at a file of another name, by which it leaves the given folder."""
        self.see_changed(name)
        if not name.startswith(self._inside):
            self._opened.add(name)

    def _keep(self, name: str) -> None:
        if name in self._before:
            return
        path = Path(name)
        is_text = path.is_file() and not path.is_symlink() and path.suffix in _TEXT
        if is_text and (status := path.stat()).st_size <= _MOST_KEPT:
            self._before[name] = _Text(path.read_bytes(), stat.S_IMODE(status.st_mode))
        elif not os.path.lexists(path):
            self._before[name] = None
        elif not path.is_dir() and not _is_device(name):
            self.plain.add(name)
            raise _refusal(
                name,
                "expected to change nothing that was there before but short text, got this file. Do so only where "
                "fastrack.is_rehearsing() is False",
            )

    def judge(self) -> bool:
        """Look at all files at the end: writers in C, C++ and Rust open theirs unseen. Return whether any is inside."""
        written = {str(Path(root, name)) for root, _, names in os.walk(self._inside) for name in names}
        for path in written | self._opened:
            self._judge(path, _is_text_by_name)
        return any(_together(bool(written)))

    def put_back(self) -> None:
        """Put files elsewhere back, and remove those that were not there."""
        for name, before in self._before.items():
            path = Path(name)
            if before is None:
                with contextlib.suppress(OSError):
                    path.unlink()
            elif not path.is_file() or path.read_bytes() != before.content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(before.content)
                path.chmod(before.mode)

    def _judge(self, name: str, is_text: Callable[[Path], bool]) -> None:
        """Note a file that is neither sealed, nor text, nor no more."""
        with contextlib.suppress(OSError, FastrackError):
            if _is_allowed(Path(name), is_text):
                return
        is_inside = name.startswith(self._inside)
        self.plain.add(os.path.relpath(name, self._inside) if is_inside else name)


class _Text(NamedTuple):
    """A file of text as it was before a rehearsal."""

    content: bytes
    mode: int


def _refusal(path: str, text: str) -> FastrackError:
    error = FastrackError(f"rehearsing a save failed: {path}: {text}")
    error.path = Path(path)
    return error


def _is_allowed(path: Path, is_text: Callable[[Path], bool]) -> bool:
    """Return whether a file is sealed, or text, or no more."""
    if not path.is_file():
        return True
    sealed = open_sealed(path)
    if sealed is not None:
        sealed.close()
        return True
    return is_text(path)


def _is_text_by_name(path: Path) -> bool:
    if path.suffix == ".model" and path.read_bytes().startswith(_SENTENCE_PIECE):
        return True
    return path.suffix in _TEXT and _is_text(path)


def _is_text(path: Path) -> bool:
    try:
        return "\0" not in path.read_bytes().decode()
    except UnicodeDecodeError:
        return False


def _open_folders() -> list[str]:
    """Return the folders that this process has open."""
    return [str(each) for each in Path("/proc/self/fd").iterdir() if each.is_dir()]


def _full(path: Any, folder: Any = -1) -> str:
    """Return the path that a function of `os` means, with the descriptor of a folder that it is relative to, or -1."""
    if isinstance(path, int):
        return f"/proc/self/fd/{path}"
    above = Path(f"/proc/self/fd/{folder}" if isinstance(folder, int) and folder >= 0 else "")
    full = above / os.fsdecode(path)
    return str(full.parent.resolve() / full.name)  # the file itself: a link is removed, and not what it leads to


def _is_device(name: str) -> bool:
    """Return whether a path is of a terminal, a pipe, the kernel or the like, where nothing is kept."""
    if name.startswith(("/proc/", "/sys/")):
        return True
    try:
        mode = Path(name).stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@functools.cache  # once a process, as the interpreter's list of hooks is
def _hook() -> None:
    """Have Python tell what it opens, for good: such a hook cannot be removed. Without a rehearsal it does nothing."""
    sys.addaudithook(_see)


def _see(
    event: str, arguments: tuple[Any, ...], seen: frozenset[str] = _SEEN, watching: Callable[[], Any] = _watch.get
) -> None:
    # Names that are bound here: as the process ends, this is called when the module has none any more.
    watch = watching() if event in seen else None
    if watch is None or not watch.is_on:
        return
    caller = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
    if caller == "importlib":  # which keeps the code of modules that the save is the first to import
        return
    if event == "open":
        watch.see_opened(*arguments, caller)
    elif event == "os.remove":
        watch.see_removed(_full(*arguments))
    elif event in {"os.rename", "os.link"}:
        source, target, from_folder, to_folder = arguments
        if event == "os.rename":
            watch.see_changed(_full(source, from_folder))
        watch.see_named(_full(target, to_folder))
    else:
        watch.see_changed(_full(arguments[0]))


def _make_folder() -> Path:
    """Make one folder for all processes of the group, in the memory of each machine if it can be."""
    above = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    folder: Path = _together(above / f"fastrack-rehearsal-{secrets.token_hex(16)}")[0]
    folder.mkdir(mode=0o700, exist_ok=True)  # another process of this machine may have made it
    require_own(folder)
    return folder


def _together(value: Any) -> list[Any]:
    """Return the values of all processes of the group, when each of them has come here."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
