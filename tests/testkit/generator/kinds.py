"""All kinds of cases, and the files that they become."""

from collections.abc import Callable

from generator import (
    exchange,
    folders,
    grants,
    key_files,
    manifest_files,
    manifests,
    ranks,
    sealed_entries,
    sealed_files,
    wrapped,
)
from generator.case import Cases

PAGE = "https://github.com/fastrack-io/fastrack/blob/main/docs/format.md"

MAKERS: tuple[Callable[[], Cases], ...] = (
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
    exchange.offers,
    exchange.answers,
)


def files() -> dict[str, bytes]:
    """Return the bytes of each file of the kit that is made, by its path."""
    made: dict[str, bytes] = {}
    rules: dict[str, tuple[str, str]] = {}
    for maker in MAKERS:
        kind = maker()
        for case in kind.all:
            path = f"cases/{case.kind}/{case.name}"
            if path in made:
                raise ValueError(f"{path} is there already")
            made[path] = case.encode()
        rules |= {f"{kind.kind}.{rule}": told for rule, told in kind.rules.items()}
    return made | {"rules.md": table(rules).encode()}


def table(rules: dict[str, tuple[str, str]]) -> str:
    """Return the page of the rules."""
    rows = (f"| `{rule}` | [{section}]({PAGE}#{section}) | {text} |\n" for rule, (section, text) in rules.items())
    head = "# Rules\n\nThe rules that the cases try, each with the section of the page of the formats that sets it.\n\n"
    return head + "| rule | section | |\n|---|---|---|\n" + "".join(rows)
