"""Indexes of weights that lie in several files: compare what each names with the headers of its shards."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from fastrack._documents.canonical import parsing
from fastrack._documents.strict import parse_strict
from fastrack._util.locations import Location, join
from fastrack.errors import FormatError

_INDEX = re.compile(r"((?:.*/)?)([^/]*)\.safetensors\.index(\.[^./]+)?\.json", re.DOTALL)
_TOLD = 3  # differences that an error lists


def is_weight_map(name: str) -> bool:
    """Return True for the name of an index of shards, such as ``model.safetensors.index.json``."""
    return _INDEX.fullmatch(name) is not None


def compare_shards(
    root: Location,
    index: str,
    content: bytes,
    files: Collection[str],
    names_in: Callable[[str], Iterable[str] | None],
    advice: str,
) -> None:
    """Refuse an index that does not name each tensor of its shards once, with the shard that has it.

    Else a loader leaves parameters as they were before, random or not initialised, or takes the weights of an older
    save. `files` are all of the folder `root`; `names_in` returns the tensors of one, or None if this is not known.
    """
    place, form = join(root, index), _INDEX.fullmatch(index)
    assert form is not None
    folder, stem, variant = form[1], re.escape(form[2]), re.escape(form[3] or "")
    with parsing(f"{place}: expected a weight_map from names of tensors to names of files, got another", advice):
        shards: dict[str, set[str]] = {}
        for tensor, shard in parse_strict(content.decode())["weight_map"].items():
            shards.setdefault(folder + shard, set()).add(tensor)
    problems = []
    for shard, listed in sorted(shards.items()):
        if shard not in files:
            problems.append(f"no file {shard!r:.200}")
            continue
        names = names_in(shard)
        found = listed if names is None else set(names)
        problems += [f"no {tensor!r:.200} in {shard!r:.200}" for tensor in sorted(listed - found)]
        problems += [f"{tensor!r:.200} in {shard!r:.200} besides" for tensor in sorted(found - listed)]
    number = "-[0-9]+-of-[0-9]+"
    # The whole model in one file, too, as some loaders prefer it.
    of_this = re.compile(rf"{re.escape(folder)}{stem}({variant}{number}|{number}{variant}|{variant})\.safetensors")
    left = sorted(name for name in files if name not in shards and of_this.fullmatch(name))
    problems += [f"a file {name!r:.200} that it does not name" for name in left]
    if problems:
        more = f"; and {len(problems) - _TOLD} more differences" if len(problems) > _TOLD else ""
        raise FormatError(
            f"{place}: expected each tensor of its shards once, where it says, and no other shard, got "
            f"{'; '.join(problems[:_TOLD])}{more}. {advice[0].upper()}{advice[1:]}"
        )
