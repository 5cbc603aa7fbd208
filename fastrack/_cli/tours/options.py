"""Options of several commands of tours, and the files that they name."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.errors import refuse_options
from fastrack._util.shown import shown
from fastrack.errors import FormatError, RollbackError
from fastrack.grants import Verifier
from fastrack.tour import Chain
from fastrack.tour._folder import CHAIN

Source = Annotated[Path, typer.Argument(metavar="CHAIN", help="The chain of the tour, or a model folder of it.")]
OwnerKey = Annotated[Path, typer.Option("--owner", metavar="PUBLIC", help="The public file of the model's owner.")]
PlanDigest = Annotated[
    str | None, typer.Option("--plan-digest", metavar="DIGEST", help="Fail unless the tour is the one of this plan.")
]

_DIGEST = re.compile(r"[0-9a-f]{64}")


def load_chain(source: Path, owner: Verifier, digest: str | None = None) -> Chain:
    """Read and verify a chain, in a file or in a model folder. Raise `RollbackError` if it is one of another plan."""
    is_other = digest is not None and not _DIGEST.fullmatch(digest)
    reason = f"expected 64 hexadecimal digits, got {shown(digest or '')}; `fastrack tour plan` prints them"
    refuse_options({"--plan-digest": is_other}, reason)
    chain = Chain.load(source / CHAIN if source.is_dir() else source, owner=owner)
    if digest not in {None, chain.plan.digest}:
        raise RollbackError(
            f"{source}: expected the plan of --plan-digest, got {chain.plan.digest}. It is another tour; ask its owner"
        )
    return chain


def list_shards(given: Sequence[str | Path]) -> list[Path]:
    """Return the sealed files of these paths, and those in and below these folders, in the order of their names."""
    found: list[Path] = []
    for path in map(Path, given):
        inside = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
        if not inside:
            raise FormatError(f"{path}: expected sealed files, got a folder without one; `fastrack seal` makes them")
        found += inside
    return found
