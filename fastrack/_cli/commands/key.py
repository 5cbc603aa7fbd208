"""``fastrack key``: show the ids of keys."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastrack._cli.console import clean, new_table, note, print_json, print_lines
from fastrack._cli.errors import (
    error_document,
    name_source,
    reading_keys,
    refuse_options,
    refuse_values,
    show_errors,
    status_of,
)
from fastrack._cli.files import open_ring
from fastrack._cli.options import Json, Silent
from fastrack._keys.keys import Key, key_file_id
from fastrack._util.atomic import new_file
from fastrack._util.regular_file import open_regular
from fastrack.errors import FastrackError, FormatError
from fastrack.grants import Identity, Recipient, Signer, Verifier

_BEGINNING = 15  # bytes that tell the kinds of files apart, and hold nothing of a key
_FEW = 3  # files that are no keys and each have a line, at most


def key(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY...",
            help="Key files, folders of them, files of key pairs, .grants and .wrapped files, or what --key takes.",
        ),
    ],
    *,
    passphrase: Annotated[
        bool | None,
        typer.Option(
            "--passphrase/--no-passphrase",
            help="Write the key of one file under a new passphrase, into KEY.wrapped; or without, into KEY.",
        ),
    ] = None,
    quiet: Silent = False,
    as_json: Json = False,
) -> None:
    """Show the id, the kind and the size of keys, and nothing secret."""
    if passphrase is not None:
        sources = [_change(sources, is_wanted=passphrase, as_json=as_json)]
    entries: list[dict[str, Any]] = []
    failed: list[tuple[str, Exception]] = []
    for argument in sources:
        try:
            expanded = _expand(argument)
        except OSError as error:
            failed.append((argument, error))
            continue
        for source in expanded:
            try:
                with reading_keys():
                    entries += _describe(source)
            except (FastrackError, OSError, ImportError) as error:
                failed.append((source, error))
    if as_json:
        errors = [{"source": source, "error": error_document(error)} for source, error in failed]
        print_json(keys=entries, **({"failed": errors, "error": errors[0]["error"]} if errors else {}))
    else:
        if entries and not quiet:
            table = new_table("id", "kind", "bits", "source", right=("bits",))
            table.columns[0].no_wrap = True  # so that ids can be copied from a narrow terminal
            for entry in entries:
                table.add_row(entry["id"], entry["kind"], str(entry["bits"] or ""), clean(entry["source"]))
            print_lines([table])
        show_errors(_fold(failed))
    if failed:
        raise typer.Exit(status_of([error for _, error in failed]))


def _fold(failed: list[tuple[str, Exception]]) -> list[str]:
    """Return the errors as lines: files that are no keys as one line, if there are more than a few, as of ``*``."""
    others = [source for source, error in failed if isinstance(error, FormatError) and not _claims_key(Path(source))]
    if len(others) <= _FEW:
        return [name_source(error, source) for source, error in failed]
    lines = [name_source(error, source) for source, error in failed if source not in others]
    return [*lines, f"{len(others):,} other files are no keys: {', '.join(others[:_FEW])}, ...; --json tells of each"]


def _claims_key(path: Path) -> bool:
    """Return whether a file is a key, or is named like one: damage of it is told."""
    return path.suffix in {".key", ".pub"} or _is_key(path)


def _expand(source: str) -> list[str]:
    """Return the keys in a folder, or the source itself if it is a file or has none."""
    path = Path(source)
    return [str(file) for file in sorted(path.iterdir()) if _is_key(file)] or [source] if path.is_dir() else [source]


def _describe(source: str) -> list[dict[str, Any]]:
    path = Path(source)
    kind = _kind_of(path)
    if path.is_dir():
        raise FormatError("expected keys in this folder, got none. Name another one, or a key file")
    rows: list[tuple[str, str, int | None]]
    if kind is not None:
        rows = [_describe_pair(path, kind)]
    elif path.suffix == ".grants" and path.is_file():
        from fastrack._keys.grants import read_unverified

        grants = read_unverified(path)
        rows = [(grants.key_id, "granted key, not verified", grants.bits)]
    elif path.suffix == ".wrapped" and path.is_file():
        from fastrack.providers import WrappedKey

        wrapped = WrappedKey.load(path)
        rows = [(wrapped.key_id, f"key wrapped by {wrapped.provider}", wrapped.bits)]
    else:
        kind = "key on a lease" if source.startswith("lease:") else "key"
        rows = [(key.id, kind, key.bits) for key in open_ring([source])]
    return [{"source": source, "id": key_id, "kind": kind, "bits": bits} for key_id, kind, bits in rows]


def _is_key(path: Path) -> bool:
    is_named = path.suffix in {".grants", ".wrapped"} and path.is_file()
    return is_named or _kind_of(path) is not None or key_file_id(path) is not None


def _kind_of(path: Path) -> str | None:
    if not path.is_file():
        return None
    with open_regular(path) as file:
        beginning = file.read(_BEGINNING + 3).removeprefix(b"\xef\xbb\xbf")[:_BEGINNING]  # its reader tells of the mark
    return {b"fastrack-public": "public", b"# fastrack secr": "secret"}.get(beginning)


def _change(sources: list[str], *, is_wanted: bool, as_json: bool) -> str:
    """Write a key under a new passphrase, in the place of the old one or into KEY.wrapped; or without, into KEY."""
    from fastrack.providers import Passphrase, WrappedKey
    from fastrack.providers._passphrase import new_passphrase

    path = Path(sources[0])
    old = WrappedKey.load(path) if path.suffix == ".wrapped" else None
    is_other = len(sources) > 1 or not (is_wanted if old is None else old.provider == Passphrase.provider)
    reason = "expected one key file, and to change or to take away a passphrase one that has it, got others"
    refuse_options({"--passphrase": is_other}, reason)
    key = Key.load(path) if old is None else old.unwrap()
    if not is_wanted:
        key.save(target := path.with_suffix(""))
    else:
        with refuse_values("--passphrase"):
            wrapper = Passphrase(new_passphrase(is_change=old is not None))
        new = wrapper.wrap(key)
        wrapper.unwrap(new).wipe()  # a key that does not unwrap is not saved
        if old is None:
            new.save(target := path.with_name(f"{path.name}.wrapped"))
        else:
            with new_file(target := path, mode=0o600, succeeds=old.to_bytes().__eq__) as file:
                file.write(new.to_bytes())
    if target != path and not as_json:
        note(f"{path} is left as it is: remove it once {target} opens")
    return str(target)


def _describe_pair(path: Path, kind: str) -> tuple[str, str, None]:
    """Return the id and the kind of a public or a secret file of a recipient, or else of an owner."""
    public: Recipient | Verifier
    try:
        public = Recipient.load(path) if kind == "public" else Identity.load(path).recipient
        name = f"{kind} key of a recipient"
    except FormatError:
        public = Verifier.load(path) if kind == "public" else Signer.load(path).verifier
        name = "public key of an owner" if kind == "public" else "signing key"
    return public.id, f"{name}, {public.algorithm}", None
