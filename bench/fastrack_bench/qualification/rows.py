"""The table of rows: what each does to a copy of the folder, or asks, and the one kind of error that it expects."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from fastrack._cli.console import clean
from fastrack._files.writer import save_file as save_sealed
from fastrack._keys.keys import Key
from fastrack._models.mounts import Mount
from fastrack._sealed.seal import unseal
from fastrack._sets.anchor import Anchor
from fastrack._sets.folder import INDEX
from fastrack._util.shown import format_size
from fastrack.errors import AuthenticationError as Altered
from fastrack.errors import FastrackError, FormatError, GrantError, KeyPermissionError, UnknownKeyError
from fastrack.errors import RollbackError as Replaced
from fastrack.grants import Grants, Identity, Signer
from fastrack_bench.qualification import machine
from fastrack_bench.qualification.record import FAILED, LONGEST, PASSED, Result
from fastrack_bench.qualification.stage import Copy, EndedError, Outcome, Stage, expect, list_files, not_asked

Action: TypeAlias = Callable[[Stage], Outcome]

_PIECE, _PIECES, _DISTINCT = 64, 3, 24  # bytes to search for, the number of pieces, and different bytes in each
_SEALED_AGAIN = 2 << 30  # bytes of a file, at most
_TINY = {"x": np.zeros(3, np.float32)}


def run(stage: Stage, tell: Callable[[str], None]) -> tuple[Result, ...]:
    """Run all rows, and tell of each before."""
    results, start = list[Result](), time.perf_counter()
    stage.kept["files"] = list_files(stage.folder)
    for number, (name, action) in enumerate(ROWS, 1):
        tell(f"{number} of {len(ROWS)}: {name}")
        try:
            state, seen = action(stage)
        except EndedError as end:
            state, seen = end.args
        except Exception as error:  # noqa: BLE001 - what was not expected fails the row, and not the others
            state, seen = FAILED, f"expected no error, got {type(error).__name__}: {error}"
        seen = clean(seen.replace(f"{stage.path}/", "")).encode("ascii", "backslashreplace").decode()
        start, before = time.perf_counter(), start
        results.append(Result(number, name, state, seen[:LONGEST], int(1000 * (start - before))))
    return tuple(results)


def _refused(kind: type[Exception], change: Callable[[Copy], str]) -> Action:
    """Return the action of a row: a load of a copy with a changed file raises this kind of error, with its name."""

    def act(stage: Stage) -> Outcome:
        with stage.copy() as copy:
            name = change(copy)
            return expect(kind, name, lambda: stage.load(copy.path, first=name))

    return act


def _shard(change: Callable[[Copy, str], str]) -> Callable[[Copy], str]:
    return lambda copy: change(copy, copy.stage.shards()[0])


def _seal(copy: Copy, name: str, tensors: Callable[[Copy, str], dict[str, Any]]) -> str:
    """Seal another shard under the key of the folder, if that key seals."""
    given = tensors(copy, name)
    try:
        key = copy.stage.ring[copy.stage.opened.key_id]
        return copy.replace(name, lambda path: save_sealed(given, path, key))
    except FastrackError as error:
        not_asked(f"the key does not seal: {error}")


def _same(copy: Copy, name: str) -> dict[str, Any]:
    with copy.stage.opened.open(name) as file:
        if sum(tensor.nbytes for tensor in file.values()) > _SEALED_AGAIN:
            not_asked(f"the smallest file of weights has more than {format_size(_SEALED_AGAIN)}")
        return {each: unseal(tensor, copy.stage.ring, framework="numpy") for each, tensor in file.items()}


def _rename(copy: Copy, name: str) -> str:
    with copy.stage.opened.open(name) as file:
        old = b'"%s' % next(iter(file)).encode()

    def change(file: BinaryIO) -> None:
        file.seek(0)
        header = file.read(int.from_bytes(file.read(8), "little"))
        file.seek(8)
        file.write(header.replace(old, old[:1] + bytes([old[1] ^ 1]) + old[2:]))

    return copy.edit(name, change)


def _flip_named(pattern: str, noun: str) -> Callable[[Copy], str]:
    """Return the change of the first file by such a name, sealed or not."""

    def change(copy: Copy) -> str:
        found = [name for name in copy.stage.opened.files if re.fullmatch(pattern, name.rpartition("/")[2])]
        return copy.flip(found[0], 1) if found else not_asked(f"the folder has no {noun}")

    return change


def _load(stage: Stage) -> Outcome:
    def keep(array: Any) -> None:
        data = array.reshape(-1).view(np.uint8)[: 1 << 20].tobytes()
        pieces = (data[start : start + _PIECE] for start in range(0, len(data) - _PIECE + 1, _PIECE))
        if len(stage.needles) < _PIECES and (piece := next((p for p in pieces if len({*p}) >= _DISTINCT), None)):
            stage.needles.append(piece)

    start = time.perf_counter()
    with stage.copy() as copy:
        nbytes = stage.load(copy.path, take=keep)
    return PASSED, f"{len(stage.opened.files)} files, {format_size(nbytes)} in {time.perf_counter() - start:.2f} s"


def _anchored(stage: Stage) -> Outcome:
    anchor = _copy_anchor(stage)
    stage.load(anchor=anchor)
    stage.kept["version"] = anchor.version
    return PASSED, f"version {anchor.version} of lineage {anchor.lineage}"


def _outdated(stage: Stage) -> Outcome:
    """Load the folder under an anchor that has seen a newer one."""
    given, wanted = _copy_anchor(stage), stage.kept["version"] + 1
    newer = Anchor.create(stage.new("anchor"), owner=given.owner, lineage=given.lineage, least_version=wanted)
    return expect(Replaced, f"version {wanted} or later", lambda: stage.load(anchor=newer))


def _copy_anchor(stage: Stage) -> Anchor:
    if stage.anchor is None:
        not_asked("no --anchor: an older copy of the whole folder is authentic")
    path = stage.new("anchor")
    path.write_bytes(stage.anchor.read_bytes())
    path.chmod(0o600)
    return Anchor(path)


def _with_key_file(kind: type[Exception], change: Callable[[Path], object]) -> Action:
    """Return the action of a row: a throw-away key file that was changed is refused."""

    def act(stage: Stage) -> Outcome:
        path = stage.new("throw-away.key")
        Key.generate().save(path)
        change(path)
        return expect(kind, path.name, lambda: stage.load(keys=str(path)))

    return act


def _other_key(stage: Stage) -> Outcome:
    return expect(UnknownKeyError, stage.opened.key_id, lambda: stage.load(keys=Key.generate()))


def _grant(stage: Stage, *, expired: bool = False, withdrawn: bool = False) -> Outcome:
    """Use a grant that has ended, that is another machine's, or of another key than the broker had before."""
    signer, key, mine, now = Signer.generate(), Key.generate(), Identity.generate(), datetime.now(UTC)
    holder = Identity.generate() if withdrawn else mine
    grants = Grants.issue(key, [holder.recipient], signer=signer, expires=now + timedelta(days=1))
    if expired or withdrawn:
        later = now + timedelta(days=2 * expired)
        return expect(GrantError, key.id, lambda: grants.unlock(mine, now=later))
    return expect(UnknownKeyError, stage.opened.key_id, lambda: stage.load(keys=grants.unlock(mine)))


def _read_plainly(stage: Stage) -> Outcome:
    return expect(SafetensorError, "header", lambda: load_file(stage.folder / stage.shards()[0]))


def _mount(stage: Stage) -> Outcome:
    """Look for files that are absent for a server, which would make up others of that."""
    names = [name for name in stage.opened.files if not name.lower().endswith(".py")]
    with Mount(stage.opened, stage.ring) as mount:
        absent = [name for name in names if not (mount.path / name).exists()]
        closed = [name for name in set(names).difference(absent) if not (mount.path / name).stat().st_mode & 0o400]
    told = f"; not opened unasked: {', '.join(sorted(closed))}" if closed else ""
    return (FAILED, f"absent: {', '.join(absent)}") if absent else (PASSED, f"{len(names)} files there{told}")


def _unchanged(stage: Stage) -> Outcome:
    files, before = list_files(stage.folder), stage.kept["files"]
    changed = [str(path) for path in files.keys() | before.keys() if files.get(path) != before.get(path)]
    return (FAILED, f"changed: {', '.join(sorted(changed))}") if changed else (PASSED, f"{len(files)} files as before")


_TOKENIZER = r"(tokenizer|vocab|merges|spm|spiece|sentencepiece|tiktoken|bpe).*"

ROWS: tuple[tuple[str, Action], ...] = (
    ("genuine load", _load),
    ("two shards swapped", _refused(Replaced, lambda copy: copy.swap(*copy.stage.shards(2)))),
    ("a shard missing", _refused(Replaced, _shard(lambda copy, name: copy.replace(name, lambda _: None)))),
    ("a foreign shard, same key", _refused(Replaced, _shard(lambda copy, name: _seal(copy, name, lambda *_: _TINY)))),
    (
        "an unencrypted shard",
        _refused(Replaced, _shard(lambda copy, name: copy.replace(name, partial(save_file, _TINY)))),
    ),
    ("a shard of another seal", _refused(Replaced, _shard(lambda copy, name: _seal(copy, name, _same)))),
    ("a shard cut short", _refused(FormatError, _shard(lambda copy, name: copy.cut(name)))),
    ("a bit in a shard's middle", _refused(Altered, _shard(lambda copy, name: copy.flip(name, 0.5)))),
    ("a bit in its last chunk", _refused(Altered, _shard(lambda copy, name: copy.flip(name, 1)))),
    ("a name in its header", _refused(Replaced, _shard(_rename))),
    ("configuration altered", _refused(Altered, _flip_named(r"config\.json", "config.json"))),
    ("another tokenizer", _refused(Altered, _flip_named(_TOKENIZER, "tokenizer"))),
    ("weights' index altered", _refused(Altered, _flip_named(r".*\.index\.json", "index of shards"))),
    ("folder's index altered", _refused(Altered, lambda copy: copy.flip(INDEX, 1))),
    ("folder's index missing", _refused(FileNotFoundError, lambda copy: copy.replace(INDEX, lambda _: None))),
    ("under the anchor", _anchored),
    ("older than the anchor", _outdated),
    ("another key", _other_key),
    ("a key that others may use", _with_key_file(KeyPermissionError, lambda path: path.chmod(0o655))),
    ("a damaged key", _with_key_file(FormatError, lambda path: path.write_bytes(path.read_bytes()[:-9]))),
    ("an expired grant", lambda stage: _grant(stage, expired=True)),
    ("a withdrawn grant", lambda stage: _grant(stage, withdrawn=True)),
    ("a grant of another key", _grant),
    ("a reader without fastrack", _read_plainly),
    ("files a server would miss", _mount),
    ("a full file system", machine.fill_disk),
    ("a machine without proof", machine.ask_without_proof),
    ("an offer replayed", machine.replay_offer),
    ("a slow broker", machine.disturb_broker(TimeoutError, "in time", signal.SIGSTOP)),
    ("a broker killed meanwhile", machine.disturb_broker(ConnectionRefusedError, "refused", signal.SIGKILL)),
    ("no broker", machine.ask_nobody),
    ("this machine, by the policy", machine.judge_this_machine),
    ("another measurement", machine.judge_another),
    ("a debug machine", machine.judge_debugged),
    ("a stale challenge", machine.answer_late),
    ("another challenge's proof", machine.answer_another),
    ("a GPU in dev-tools mode", machine.look_at_gpu("dev-tools mode is on", devtools=True)),
    ("a GPU that is not ready", machine.look_at_gpu("the GPU refuses all work", ready=False)),
    (
        "NVLink encryption only",
        machine.look_at_gpu("confidential mode is off", enabled=False, multi_gpu="NVLink encryption"),
    ),
    ("states of the GPUs", machine.read_gpus),
    ("dumps, swap, debuggers", machine.read_kernel),
    ("plaintext in files", machine.find_in_files),
    ("plaintext in the parent", machine.find_in_parent),
    ("the folder itself", _unchanged),
)
"""Each row by its name, in the order of their numbers, which records have: new ones come last."""
