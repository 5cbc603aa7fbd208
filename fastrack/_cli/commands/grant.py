"""``fastrack grant``: wrap a key for recipients, and change who may open."""

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Self

import typer

from fastrack._cli.console import clean, pluralize, remove, tell
from fastrack._cli.errors import reading_keys, refuse_options, refuse_values
from fastrack._cli.files import check_directory, check_sealed, check_target, open_ring
from fastrack._cli.options import Json, Silent
from fastrack._keys.grants import NO_ID, ids_of, read_unverified
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._keys.signing import read_unverified_payload
from fastrack._util.atomic import new_file
from fastrack._util.rights import open_own
from fastrack.errors import FormatError, RollbackError
from fastrack.grants import Grants, Identity, Recipient, Signer, Verifier

To = Annotated[
    list[Path] | None, typer.Option("--to", metavar="PUBLIC", help="The public file of a recipient; may be repeated.")
]
Sign = Annotated[
    Path | None, typer.Option("--sign", metavar="SIGNER", help="The owner's signing key, of `keygen --signer`.")
]
_LISTED = 8  # ids of files on a line, at most
_PERIOD = re.compile(r"(?P<count>\d{1,5})(?P<unit>[hdw])")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


def grant(
    source: Annotated[
        str, typer.Argument(metavar="KEY", help="The key to grant; or a .grants file, to change or to show it.")
    ],
    *,
    to: To = None,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="WHO", help="Remove this recipient: a name, an id, or passphrase."),
    ] = None,
    sign: Sign = None,
    passphrase: Annotated[bool, typer.Option("--passphrase", help="Ask for a passphrase that opens as well.")] = False,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", metavar="SEALED", help="Grant this sealed file or dataset only; may be repeated."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="WHEN", help="The end of the grant: a date as 2027-01-31, or 12h, 30d, 8w.")
    ] = None,
    least_version: Annotated[
        int, typer.Option(min=0, help="The least version of a published set that may be opened, with an anchor.")
    ] = 0,
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="The granted key, to add recipients to a .grants file.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option(metavar="SECRET", help="A recipient's secret file, in place of --key.")
    ] = None,
    owner: Annotated[
        Path | None, typer.Option(metavar="PUBLIC", help="The owner's public file, to show a .grants file verified.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="GRANTS", help="The file to write. If absent, KEY.grants.")
    ] = None,
    quiet: Silent = False,
    as_json: Json = False,
) -> None:
    """Wrap a key for recipients, in a signed file beside the data, which stays as it is."""
    path, notes = Path(source), list[str]()
    if not source.endswith(".grants"):
        refuse_options({"--drop": drop}, "expected none for a key that is granted anew")
        notes = [f"{each}: its shards of today; grant the key again when it has grown" for each in _data_sets(file)]
        path = Path(f"{source}.grants") if out is None else out
        grants = _issue(source, path, to, sign, passphrase, file, expires, least_version)
    elif file or expires is not None or least_version:
        reason = "expected none for grants that exist: each entry is bound to them. Grant the key anew, with --out"
        raise typer.BadParameter(reason, param_hint="--expires, --file or --least-version")
    elif to or drop or passphrase:
        grants = _change(path, path if out is None else out, to, drop, sign, passphrase, key, identity)
        path = path if out is None else out
    elif owner is not None:
        grants = Grants.load(path, owner=Verifier.load(owner))
    else:
        _report(read_unverified(path), path, as_json, quiet, verified=False)
        return
    _report(grants, path, as_json, quiet, notes=notes)


@dataclass(frozen=True, slots=True)
class Grantees:
    """The recipients of a new key, under which a file is sealed, and the path of its grants."""

    recipients: list[Recipient]
    signer: Signer
    path: Path

    @classmethod
    def load(cls, to: list[Path], sign: Path | None, target: Path, *, force: bool) -> Self:
        """Load the keys before anything is sealed, and check that the grants of `target` can be written."""
        path = target.with_name(f"{target.name}.grants")
        check_target(path, force=force)
        return cls(load_recipients(to), load_signer(sign), path)

    def grant(self, key: Key, file_ids: list[str], target: Path) -> None:
        """Grant the key for the sealed files of a target, and wipe it. A target that cannot be granted is removed."""
        try:
            Grants.issue(key, self.recipients, signer=self.signer, files=file_ids).save(self.path)
        except BaseException:
            remove(target)
            raise
        finally:
            key.wipe()


def load_recipients(paths: list[Path] | None) -> list[Recipient]:
    """Return the public keys in these files."""
    with reading_keys():
        return [Recipient.load(path) for path in paths or ()]


def _issue(
    source: str,
    target: Path,
    to: list[Path] | None,
    sign: Path | None,
    passphrase: bool,
    files: list[Path] | None,
    expires: str | None,
    least_version: int,
) -> Grants:
    reason = "expected a recipient, got none; name a public file, or use --passphrase"
    refuse_options({"--to": not to and not passphrase}, reason)
    check_directory(target)
    if target.exists():
        advice = "it exists and is left as it was; name it in place of KEY to change it"
        raise FileExistsError(errno.EEXIST, advice, str(target))
    ring = open_ring(source)
    grants = Grants.issue(
        ring.first,
        load_recipients(to),
        signer=load_signer(sign),
        files=[file_id for path in files for file_id in _file_ids(path, ring)] if files else None,
        passphrase=_ask_passphrase() if passphrase else None,
        expires=None if expires is None else _parse_end(expires),
        least_version=least_version,
    )
    grants.save(target)
    return grants


def _change(
    source: Path,
    target: Path,
    to: list[Path] | None,
    drop: list[str] | None,
    sign: Path | None,
    passphrase: bool,
    key: str | None,
    identity: Path | None,
) -> Grants:
    signer = load_signer(sign)
    grants = Grants.load(source, owner=signer.verifier)
    replaced = Replaced.load(Path(f"{sign}.replaced"))
    digest = replaced.require_newest(grants, source)
    with refuse_values("--drop"):
        dropped = ids_of(grants, drop or ())
    recipients = load_recipients(to)
    if to or passphrase:
        reason = "expected the granted key, to wrap it, got none; or pass --identity"
        refuse_options({"--key": key is None and identity is None}, reason)
        granted = None if key is None else open_ring(key).first
        secret = None if identity is None else Identity.load(identity)
        text = _ask_passphrase() if passphrase else None
        with refuse_values("--key"):
            grants = grants.add(recipients, signer=signer, key=granted, identity=secret, passphrase=text)
    # By id, once the new ones are there: names may be equal, and what is granted anew stays.
    dropped -= {*(recipient.id for recipient in recipients), *([NO_ID] * passphrase)}
    if dropped:
        with refuse_values("--drop"):
            grants = grants.remove(dropped, signer=signer)
    grants.save(target)
    if drop or target.resolve() == source.resolve():
        replaced.add(digest)
    return grants


@dataclass(frozen=True, slots=True)
class Replaced:
    """The hashes of replaced grants, kept next to the owner's signing key: storage cannot be trusted to know them."""

    path: Path
    digests: tuple[str, ...]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file. There are none if it does not exist."""
        if not os.path.lexists(path):
            return cls(path, ())
        with open_own(path) as file:
            return cls(path, tuple(file.read().decode().split()))

    def require_newest(self, grants: Grants, source: Path) -> str:
        """Refuse replaced grants, which would look newer once signed again. Return the hash of current ones."""
        digest = sha256(read_unverified_payload(grants.envelope)).hexdigest()  # an envelope has several forms
        if digest in self.digests:
            raise RollbackError(
                f"changing {clean(str(source))} failed: expected the newest grants of key {grants.key_id}, got number "
                f"{grants.serial}, which others replaced. Get the newest, or grant the key anew"
            )
        return digest

    def add(self, digest: str) -> None:
        """Write the file with one more hash."""
        with new_file(self.path, mode=0o600) as file:
            file.write("".join(f"{known}\n" for known in (*self.digests, digest)).encode())


def _report(
    grants: Grants, path: Path, as_json: bool, quiet: bool, *, verified: bool = True, notes: Sequence[str] = ()
) -> None:
    entries = [{"name": entry.name, "id": entry.id, "algorithm": entry.algorithm} for entry in grants.recipients]
    end = None if grants.expires is None else grants.expires.isoformat()
    state = "" if verified else ", NOT VERIFIED: name the owner's public file with --owner"
    is_over = grants.expires is not None and grants.expires <= datetime.now(UTC)
    lines = [f"{clean(str(path))}: {pluralize(len(entries), 'recipient')}{state}", f"key: {grants.key_id}"]
    for entry in grants.recipients:
        who = "a passphrase" if entry.algorithm == "Argon2id" else f"{clean(entry.name or 'unnamed')} {entry.id}"
        lines.append(f"  {who}  {clean(entry.algorithm)}")
    lines += [
        f"files: {_describe_files(grants.files)}",
        *([f"lease: {grants.seconds} s, asked for again after {grants.renew_after} s"] if grants.seconds else []),
        *([f"GPUs: confidential, {', '.join(grants.gpus or ()) or 'any'}"] if grants.require else []),
        *map(clean, notes),
        f"expires: {end or 'never'}{', which is over: nothing is opened by it' if is_over else ''}",
    ]
    tell(
        lines,
        as_json=as_json,
        quiet=quiet,
        path=str(path),
        verified=verified,
        key_id=grants.key_id,
        bits=grants.bits,
        recipients=entries,
        files=None if grants.files is None else list(grants.files),
        lineage=grants.lineage,
        least_version=grants.least_version,
        expires=end,
        require=grants.require,
        gpus=None if grants.gpus is None else list(grants.gpus),
        seconds=grants.seconds,
        renew_after=grants.renew_after,
        issued=grants.issued.isoformat(),
        serial=grants.serial,
    )


def _describe_files(ids: Sequence[str] | None) -> str:
    if ids is None:
        return "all files under this key"
    return ", ".join(ids) if len(ids) <= _LISTED else f"{len(ids)} files, whose ids --json lists"


def _data_sets(paths: Sequence[Path] | None) -> list[Path]:
    from fastrack._samples.data_set import is_data_set

    return [path for path in paths or () if is_data_set(path)]


def _file_ids(path: Path, ring: KeyRing) -> list[str]:
    """Return the id of a sealed file, or the ids of all shards of a dataset, authenticated."""
    from fastrack._samples.stored import read_data_set
    from fastrack._sealed.message_headers import authenticate_headers
    from fastrack._sets.load_file import load_file

    if _data_sets([path]):
        data = read_data_set(path, ring)
        if data.before:  # storage may have chosen them among all files of the key
            raise FormatError(
                f"{path}: expected shards that say of which dataset they are, got some that do not: version 0.1 wrote "
                "them, or someone removed it. Name those to grant one by one, each with --file"
            )
        return list(data.file_ids)
    with load_file(path) as sealed:
        check_sealed(sealed, ring)
        authenticate_headers(list(sealed.values()), ring)
        assert sealed.file_id is not None
        return [sealed.file_id]


def load_signer(path: Path | None) -> Signer:
    """Return the signing key of an option ``--sign``."""
    if path is None:
        reason = "expected the owner's signing key, got none; `fastrack keygen owner.signer --signer` makes one"
        raise typer.BadParameter(reason, param_hint="--sign")
    with reading_keys():
        return Signer.load(path)


def _ask_passphrase() -> str:
    from fastrack.providers._passphrase import new_passphrase

    with refuse_values("--passphrase"):
        return new_passphrase()


def _parse_end(text: str) -> datetime:
    match = _PERIOD.fullmatch(text)
    if match is not None:
        return datetime.now(UTC) + timedelta(**{_UNITS[match["unit"]]: int(match["count"])})
    try:
        end = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"expected a date as 2027-01-31 or a period as 12h, 30d or 8w, got {text!r:.40}", param_hint="--expires"
        ) from None
    return end if end.tzinfo is not None else end.replace(tzinfo=UTC)
