"""Settings of a site for its own visits: a file that no job names, with code, data, device and desks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from fastrack._documents.fields import SECONDS, TEXT
from fastrack._documents.toml import Table, filled
from fastrack._keys.signing import Verifier
from fastrack._util.rights import open_own
from fastrack.attest._collect import collect_evidence
from fastrack.attest._exchange import Collector
from fastrack.errors import GrantError, RollbackError
from fastrack.tour._chain import Chain
from fastrack.tour._http import RemoteDesk
from fastrack.tour._messages import Desk

_LIMIT = 1 << 20  # bytes


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
            text = file.read(_LIMIT)
        table, folder = Table.parse(text, f"settings {path}"), path.absolute().parent
        owner, holder, train = (table.needed(key, TEXT) for key in ("owner", "holder", "train"))
        data = tuple(_locate(each, folder) for each in table.needed("data", _DATA))
        desks = {key: _read_desk(table, key, folder) for key in ("owner_desk", "holder_desk")}
        collect, device = table.read("collect", TEXT), table.read("device", TEXT)
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
                f"{chain.plan.owner.id}. This site trains only models of that owner"
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


_DATA = filled(TEXT, "a list of paths or URLs", tuple)
_PATHS = ("certificate", "private_key", "ca")
_OPTIONS = {"timeout": SECONDS}


def _read_desk(settings: Table, key: str, folder: Path) -> Desk:
    table = settings.table(key)
    if table is None:
        raise settings.refusal(key, "a table", "none")
    url, options = table.needed("url", TEXT), table.read_all(_OPTIONS)
    paths = table.read_all(dict.fromkeys(_PATHS, TEXT))
    table.done()
    options |= {name: _locate(path, folder) for name, path in paths.items()}
    return RemoteDesk(url, **options)


def _locate(path: str, folder: Path) -> str:
    """Return a path that begins at a folder, or a URL as it is."""
    return path if "://" in path else str(folder / path)


def _find(name: str, table: Table) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        function: Callable[..., Any] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise table.refusal("collect", "module:function", f"{name!r:.80}: {error}") from error
    return function
