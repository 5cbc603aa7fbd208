"""All kinds of cases, and the files that they become."""

import io
import tarfile
from collections.abc import Callable
from functools import cache

from generator import (
    chain_documents,
    chains,
    data_sets,
    exchange,
    folders,
    grants,
    key_files,
    manifest_files,
    manifests,
    offers,
    ranks,
    sealed_entries,
    sealed_files,
    sealed_messages,
    widened,
    wrapped,
)
from generator.parts.case import Cases, sha256

PAGE = "https://github.com/fastrack-io/fastrack/blob/main/docs/format.md"

MAKERS: tuple[Callable[[], Cases], ...] = (
    sealed_messages.cases,
    sealed_files.cases,
    sealed_entries.cases,
    key_files.keys,
    key_files.secrets,
    key_files.publics,
    ranks.blocks,
    ranks.messages,
    ranks.confirmations,
    grants.cases,
    manifests.cases,
    manifest_files.cases,
    wrapped.cases,
    folders.cases,
    exchange.challenges,
    offers.cases,
    exchange.answers,
    chains.cases,
    chain_documents.cases,
    data_sets.cases,
    widened.cases,
)


@cache
def kinds() -> tuple[Cases, ...]:
    """Return all cases, made once."""
    return tuple(maker() for maker in MAKERS)


def files() -> dict[str, bytes]:
    """Return the bytes of each file of the kit that is made, by its path."""
    made: dict[str, dict[str, bytes]] = {}
    rules: dict[str, tuple[str, str]] = {}
    for kind in kinds():
        members = made.setdefault(kind.kind, {})
        for case in kind.all:
            name = f"{case.kind}/{case.name}"
            if name in members:
                raise ValueError(f"{name} is there already")
            members[name] = case.encode()
        rules |= {f"{kind.kind}.{rule}": told for rule, told in kind.rules.items()}
    archives = {f"cases/{kind}.tar": archive(members) for kind, members in made.items()}
    digests = sorted((name, sha256(data)) for members in made.values() for name, data in members.items())
    index = "".join(f"{digest}  {name}\n" for name, digest in digests)
    return archives | {"cases/SHA256SUMS": index.encode(), "rules.md": table(rules).encode()}


def archive(members: dict[str, bytes]) -> bytes:
    """Return the archive of some files: ustar, in the order of their names, with no times, owners or compression."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as target:
        for name, data in sorted(members.items()):
            member = tarfile.TarInfo(name)  # which says mode 644, no owner, and the time 0
            member.size = len(data)
            target.addfile(member, io.BytesIO(data))
    return made.getvalue()


def table(rules: dict[str, tuple[str, str]]) -> str:
    """Return the page of the rules."""
    rows = (f"| `{rule}` | [{section}]({PAGE}#{section}) | {text} |\n" for rule, (section, text) in rules.items())
    head = "# Rules\n\nThe rules that the cases try, each with the section of the page of the formats that sets it.\n\n"
    return head + "| rule | section | |\n|---|---|---|\n" + "".join(rows)
