"""`Leftovers`: files of other saves in the folder of a checkpoint, and whether they have left it whole."""

from __future__ import annotations

import errno
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._training.checkpoints.checkpoint import load_checkpoint
from fastrack._util.locations import Location, Url, join
from fastrack.distributed._description import NAME, SHARDS, own_files, shard_file, shard_names
from fastrack.errors import FastrackError


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Shard files of other saves in a folder before a save writes to it, and uploads that have not ended.

    So a save that begins later loses nothing. One that has begun earlier and goes on, such as that of a job whose
    restart is at work already, may lose its files: `require_files` has it fail before it replaces the newer checkpoint.
    """

    folder: Location
    names: frozenset[str] = frozenset()
    uploads: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def find(cls, folder: Location) -> Leftovers:
        """Find them. A folder that cannot be listed has none, and is written to all the same."""
        with suppress(OSError):
            if isinstance(folder, Path):
                return cls(folder, frozenset(shard_names(folder)))
            from fastrack._remote.upload import list_uploads

            return cls(folder, frozenset(shard_names(folder)), tuple(list_uploads(folder, SHARDS)))
        return cls(folder)

    def remove(self, key: Key) -> None:
        """Remove them, once the new checkpoint is there, which is complete without this."""
        with suppress(OSError, FastrackError):
            files = list(own_files(self.folder, self.names, key.id))
            needed = described_files(self.folder, key)  # read last: a save that began earlier may have ended now
            for path in files:
                if path.name not in needed:
                    with suppress(OSError):
                        _remove(path)
        if not isinstance(self.folder, Path):
            from fastrack._remote.upload import remove_uploads

            with suppress(OSError):
                remove_uploads(self.folder, self.uploads)


def described_files(folder: Location, key: Key) -> set[str]:
    """Return the names of the shard files of the checkpoint that a folder has."""
    document = load_checkpoint(join(folder, NAME), keys=KeyRing(key))
    files = document.get("files") if isinstance(document, dict) else None
    return {shard_file(folder, str(file_id)).name for file_id in files or ()}


def require_checkpoint(folder: Location, key: Key, names: Collection[str]) -> None:
    """Refuse to have saved a checkpoint that lost files. `names` are its own; another save may have replaced it."""
    with suppress(OSError, FastrackError):  # credentials may allow only to write
        names = described_files(folder, key)
    require_files(folder, names)


def require_files(folder: Location, names: Collection[str]) -> None:
    """Refuse a checkpoint some of whose files are gone."""
    for path in _missing(folder, names):
        message = (
            "another save into this folder has removed it. Let each save end before the next one begins, or give it a "
            "folder of its own, and save again"
        )
        raise FileNotFoundError(errno.ENOENT, message, str(path))


def _missing(folder: Location, names: Collection[str]) -> list[Location]:
    places = [join(folder, name) for name in sorted(names)]
    with suppress(OSError):
        listed = shard_names(folder) if isinstance(folder, Url) else set()  # in which a store may lack what it has
        return [place for place in places if place.name not in listed and not _is_there(place)]
    return []


def _is_there(place: Location) -> bool:
    if isinstance(place, Path):
        return place.exists()
    from fastrack._remote.upload import has_object

    return has_object(place)


def _remove(path: Location) -> None:
    if isinstance(path, Path):
        path.unlink()
        return
    from fastrack._remote.upload import remove_object

    remove_object(path)
