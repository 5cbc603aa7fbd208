"""Settings of a site for its own visits: a file that no job names, with code, data, device and desks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from fastrack._keys.signing import Verifier
from fastrack._util.rights import open_own
from fastrack.attest._collect import collect_evidence
from fastrack.attest._exchange import Collector
from fastrack.attest._formats.toml import Table
from fastrack.errors import GrantError, RollbackError
from fastrack.tour._chain import Chain
from fastrack.tour._http import RemoteDesk
from fastrack.tour._messages import Desk

_LIMIT = 1 << 20  # bytes
_PATHS = ("certificate", "private_key", "ca")


@dataclass(frozen=True, slots=True)
class VisitSettings:
    """Settings of the visits at a site: for which owner and holder, and arguments of `fastrack.tour.visit`.

    owner : the public key of the owner whose models are trained here
    holder : the name in the plan of the holder whose data are here; train : module:function
    """

    owner: Verifier
    holder: str
    train: str
    data: tuple[str, ...]
    owner_desk: Desk
    holder_desk: Desk
    collect: Collector
    device: str | None

    @classmethod
    def load(cls, path: Path) -> VisitSettings:
        """Read a file of TOML, whose relative paths begin at its folder.

        Raises
        ------
        KeyPermissionError
            If another user owns the file, or may write to it or to its folder.
        FormatError, ValueError, OSError
            If the file, or another one that it names, is not in its form, has an unknown key or cannot be read.
        """
        with open_own(path) as file:
            text = file.read(_LIMIT).decode()
        table = Table.parse(text, f"settings {path}")
        reader = _Reader(table, path.absolute().parent)
        owner, holder, train = map(reader.needed, ("owner", "holder", "train"))
        data = reader.paths("data")
        desks = {name: reader.desk(name) for name in ("owner_desk", "holder_desk")}
        collect, device = table.text("collect"), table.text("device")
        table.done()
        collector = collect_evidence if collect is None else _find(collect, table)
        return cls(Verifier.parse(owner), holder, train, data=data, collect=collector, device=device, **desks)

    def require_turn(self, chain: Chain) -> None:
        """Raise unless the next visit of a chain is one to this holder, by a plan of this owner.

        Its desk would refuse it too. But the owner is asked first, and would have counted an attempt.
        """
        if chain.plan.owner != self.owner:
            raise GrantError(
                f"tour {chain.plan.tour}: expected a plan of the owner {self.owner.id}, got one of "
                f"{chain.plan.owner.id}. This site trains models of that owner alone"
            )
        name = chain.plan.holder(len(chain.visits))
        if name != self.holder:
            raise RollbackError(
                f"visit {len(chain.visits)} of tour {chain.plan.tour}: expected a turn of {self.holder}, got that of "
                f"{name}. Go there first"
            )

    def arguments(self) -> Mapping[str, Any]:
        """Return the keyword arguments of `fastrack.tour.visit`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "holder"}


@dataclass(frozen=True, slots=True)
class _Reader:
    """A table, with the folder that relative paths begin at."""

    table: Table
    folder: Path

    def needed(self, key: str) -> str:
        value = self.table.text(key)
        if value is None:
            raise self.table.refusal(key, "a string", "none")
        return value

    def paths(self, key: str) -> tuple[str, ...]:
        values = self.table.texts(key)
        if not values:
            raise self.table.refusal(key, "a list of paths or URLs", "none")
        return tuple(map(self._path, values))

    def desk(self, key: str) -> Desk:
        table = self.table.table(key)
        if table is None:
            raise self.table.refusal(key, "a table", "none")
        url, timeout = _Reader(table, self.folder).needed("url"), table.integer("timeout")
        given = {name: table.text(name) for name in _PATHS}
        table.done()
        options: dict[str, Any] = {name: self._path(value) for name, value in given.items() if value is not None}
        if timeout is not None:
            options["timeout"] = float(timeout)
        return RemoteDesk(url, **options)

    def _path(self, value: str) -> str:
        return value if "://" in value else str(self.folder / value)


def _find(name: str, table: Table) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        function: Callable[..., Any] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise table.refusal("collect", "module:function", f"{name!r:.80}: {error}") from error
    return function
