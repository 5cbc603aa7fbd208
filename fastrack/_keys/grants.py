"""Grants files: signed documents with a key encrypted to each recipient. ``docs/format.md`` has the format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from fastrack._documents import fields
from fastrack._documents.canonical import encode, encode_time, parsing, require
from fastrack._documents.fields import Field, FieldError, Fields, Form
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._keys.leases import LeasedKey
from fastrack._keys.recipients import (
    ALGORITHMS,
    INFO_LIMITS,
    Identity,
    PassphraseParameters,
    Recipient,
    decrypt_with_passphrase,
    encrypt_to_passphrase,
)
from fastrack._keys.signing import Signer, Verifier, open_envelope, read_unverified_payload, sign_envelope
from fastrack._util.atomic import new_file
from fastrack._util.locations import require_path
from fastrack._util.registry import PLACES, find
from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError, GrantError, UnknownKeyError

G = TypeVar("G", bound="Grants")
PAYLOAD_TYPE = "application/vnd.fastrack.grants.v1+json"
IDENTITY_VARIABLE = "FASTRACK_IDENTITY"
OWNER_VARIABLE = "FASTRACK_OWNER"
_PASSPHRASE = "Argon2id"  # noqa: S105 - the name of an algorithm

_LIMIT = 16 * 1024 * 1024  # bytes of a grants file
_KNOWN = {_PASSPHRASE, *ALGORITHMS}  # whose entries have no other members
_RECIPIENTS_LIMIT = 4096
_LABEL = b"fastrack/grant@1\0"
_BOUND: Fields = {  # which ciphertexts are bound to
    "files": fields.or_none(fields.list_of(fields.ID)),
    "key": fields.ID.of("key_id"),
    "bits": fields.BITS,
    "lineage": fields.or_none(fields.ID),
    "least_version": fields.NUMBER,
    "expires": fields.or_none(fields.TIME),
}
_CHIP = fields.text(r"[0-9A-F]{16,40}", "the id of a chip")
_LONGEST_LEASE = timedelta(days=366)
_LEASE: Fields = {
    "renew_after": fields.integer(1, int(_LONGEST_LEASE.total_seconds())),
    "seconds": fields.integer(2, int(_LONGEST_LEASE.total_seconds())),
}
_PLACE: Fields = {"gpus": fields.or_none(fields.list_of(_CHIP, 32)), "require": fields.one_of("confidential")}
# What ciphertexts are bound to, by versions: leases add one, and grants for confidential GPUs two
_MEMBERS: Mapping[int, Fields] = {
    1: _BOUND,
    2: {**_BOUND, **_LEASE},
    3: {**_BOUND, **_PLACE},
    4: {**_BOUND, **_LEASE, **_PLACE},
}


@dataclass(frozen=True, slots=True)
class Grant:
    """One entry of a grants file: the key, encrypted to one recipient.

    Parameters
    ----------
    algorithm : str
        The algorithm of the recipient's key, or "Argon2id" for a passphrase.
    id : str
        The id of the recipient; 32 zeros for a passphrase.
    name : str
        The name that the owner gave the recipient.
    ciphertext : bytes
        The encrypted key.
    parameters : PassphraseParameters or None
        The parameters of Argon2id.
    more : Mapping of str to object
        What an algorithm that this version does not know has beside these, which stays as it is.

    Examples
    --------
    >>> import fastrack
    >>> from fastrack.grants import Grants, Identity, Signer
    >>> alice = Identity.generate(name="alice")
    >>> grants = Grants.issue(fastrack.Key.generate(), [alice.recipient], signer=Signer.generate())
    >>> [(grant.name, grant.algorithm, len(grant.ciphertext)) for grant in grants.recipients]
    [('alice', 'MLKEM768_X25519', 1168)]
    """

    algorithm: str
    id: str
    name: str
    ciphertext: bytes
    parameters: PassphraseParameters | None = None
    more: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)


@dataclass(frozen=True, slots=True)
class Grants:
    """The verified content of a grants file. `issue` makes one, `load` reads and verifies one.

    Parameters
    ----------
    key_id : str
        The id of the granted key.
    bits : int
        The size of the granted key: 128 or 256.
    recipients : tuple of Grant
        The recipients of the key.
    files : tuple of str or None
        The ids of the sealed files that the key may open; None for all.
    lineage : str or None
        The lineage of the set whose files the key may open, as in its manifest; None for all.
    least_version : int
        The least version of a set whose files the key may open. Both limits need an anchor to open with.
    expires : datetime.datetime or None
        The end of the grant, in UTC.
    issued : datetime.datetime
        The time when this file was signed, in UTC.
    serial : int
        The serial number among grants files of this key; later files have higher numbers.
    envelope : bytes
        The signed document.
    require : str or None
        "confidential" if a process with the key may use no GPU but those in confidential mode.
    gpus : tuple of str or None
        The chips of the GPUs that such a process may use, by the serial numbers in their certificates; None for all.
    seconds, renew_after : int or None
        The seconds of a lease, and those after which the machine asks again; None without a lease.

    Examples
    --------
    >>> import fastrack
    >>> from fastrack.grants import Grants, Identity, Signer
    >>> owner, alice, bob = Signer.generate(), Identity.generate(), Identity.generate()
    >>> key = fastrack.Key.generate()
    >>> grants = Grants.issue(key, [alice.recipient], signer=owner)
    >>> grants = grants.add([bob.recipient], key=key, signer=owner).remove([alice.recipient], signer=owner)
    >>> grants.unlock(bob).first == key
    True
    """

    key_id: str
    bits: int
    recipients: tuple[Grant, ...]
    files: tuple[str, ...] | None
    lineage: str | None
    least_version: int
    expires: datetime | None
    issued: datetime
    serial: int
    envelope: bytes = b""
    require: str | None = None
    gpus: tuple[str, ...] | None = None
    seconds: int | None = None
    renew_after: int | None = None

    @classmethod
    def issue(
        cls,
        key: Key,
        recipients: Iterable[Recipient],
        *,
        signer: Signer,
        passphrase: str | None = None,
        files: Iterable[str] | None = None,
        lineage: str | None = None,
        least_version: int = 0,
        expires: datetime | None = None,
        require: str | None = None,
        gpus: Iterable[str] | None = None,
        lease: timedelta | None = None,
    ) -> Self:
        """Wrap a key for recipients, and sign the result.

        Parameters
        ----------
        key : Key
            The key. It can be deleted afterwards: a sealer without a copy or a grant cannot open.
        recipients : iterable of Recipient
            The public keys to encrypt the key to.
        signer : Signer
            The owner's signing key.
        passphrase : str, optional
            A passphrase that opens the key too. Choose a long passphrase: a guess costs 64 MiB of memory and 0.1 s.
        files : iterable of str, optional
            The ids of the sealed files that the key may open, from `SealedFile.file_id`. By default all.
        lineage : str, optional
            The lineage of the set whose files the key may open, with an anchor. By default all.
        least_version : int
            The least version of a set whose files the key may open, with an anchor. By default no anchor is needed.
        expires : datetime.datetime, optional
            The end of the grant, with a time zone. By default never.
        require : {"confidential"}, optional
            Have a process with the key use no GPU but those in confidential mode. Older versions refuse such grants.
        gpus : iterable of str, optional
            With `require`, the only GPUs that such a process may use, by the serial numbers of their chips in the
            devices' certificates, as in `VerifiedGpuReport.chip_id`. By default all in confidential mode.
        lease : datetime.timedelta, optional
            The time that the machine may use the key, in whole seconds, from two to 366 days. By default for ever. Only
            `fastrack.attest.lease_keys` opens such grants.

        Raises
        ------
        ValueError
            If there is no recipient, or an argument is out of range.
        """
        if expires is not None and expires.tzinfo is None:
            raise ValueError(f"issuing grants failed: expected expires= with a time zone, got {expires}")
        if require not in {None, "confidential"} or (require is None and gpus is not None):
            got = "no require=" if require is None else "another"
            raise ValueError(f"issuing grants failed: expected require='confidential', with gpus= too, got {got}")
        if lease is not None and not timedelta(seconds=2) <= lease <= _LONGEST_LEASE:
            raise ValueError(f"issuing grants failed: expected lease= of two seconds to 366 days, got {lease}")
        seconds = None if lease is None else int(lease.total_seconds())
        grants = cls(
            key_id=key.id,
            bits=key.bits,
            recipients=(),
            files=None if files is None else tuple(sorted(set(files))),
            lineage=lineage,
            least_version=least_version,
            expires=None if expires is None else expires.astimezone(UTC).replace(microsecond=0),
            issued=_now(),
            serial=0,
            require=require,
            gpus=None if gpus is None else tuple(sorted({chip.upper() for chip in gpus})),
            seconds=seconds,
            renew_after=None if seconds is None else seconds // 2,
        )
        return grants.add(recipients, key=key, signer=signer, passphrase=passphrase)

    def add(
        self,
        recipients: Iterable[Recipient],
        *,
        signer: Signer,
        key: Key | None = None,
        identity: Identity | None = None,
        passphrase: str | None = None,
    ) -> Self:
        """Return grants with more recipients, signed anew. An entry for the same recipient is replaced.

        Parameters
        ----------
        recipients : iterable of Recipient
            The public keys to add.
        signer : Signer
            The owner's signing key.
        key : Key, optional
            The granted key.
        identity : Identity, optional
            A recipient of these grants, in place of the key.
        passphrase : str, optional
            A passphrase to add. It replaces an earlier one.

        Raises
        ------
        ValueError
            If neither `key` nor `identity` is given, or `key` is not the granted key, or no recipient remains.
        GrantError
            If `identity` is not a recipient, or the key is restricted to files other than in the grants.
        """
        if key is None and identity is not None:
            key = self.unlock(identity).first
        if isinstance(key, LeasedKey):
            key.require_unrestricted()
        if key is None or key.id != self.key_id:
            got = "no key" if key is None else f"key {key.id}"
            raise ValueError(
                f"adding recipients failed: expected key {self.key_id}, got {got}; pass key= or identity= (--key, "
                "--identity)"
            )
        if key.files is not None and (self.files is None or not key.files.issuperset(self.files)):
            raise GrantError(
                f"granting key {key.id} failed: expected files= among those that the key is restricted to, got "
                f"{'all' if self.files is None else 'others'}. Name them, or use the owner's key"
            )
        if key.lineage not in {None, self.lineage} or key.least_version > self.least_version:
            raise GrantError(
                f"granting key {key.id} failed: expected the lineage= that the key is restricted to, and a "
                "least_version= not below its own, got others. Name them, or use the owner's key"
            )
        if key._bound is not None:  # noqa: SLF001 - of this package
            raise GrantError(
                f"granting key {key.id} failed: expected a key for any GPU, got one that was granted for confidential "
                "GPUs. Use the owner's key"
            )
        entries = {grant.id: grant for grant in self.recipients}
        info = _info(self)
        for recipient in recipients:
            if len(info) > INFO_LIMITS.get(recipient.algorithm, len(info)):
                raise ValueError(
                    f"granting key {key.id} failed: expected files= of some 1,870 at most for {recipient!r}, got "
                    f"{len(self.files or ())}. Grant all, in parts, or to an identity of P-384"
                )
            ciphertext = recipient.encrypt(key.material(), info)
            entries[recipient.id] = Grant(recipient.algorithm, recipient.id, recipient.name, ciphertext)
        if passphrase is not None:
            parameters, ciphertext = encrypt_to_passphrase(key.material(), passphrase, _info(self))
            entries[NO_ID] = Grant(_PASSPHRASE, NO_ID, "", ciphertext, parameters)
        return self._sign(tuple(entries.values()), signer)

    def remove(self, recipients: Iterable[Recipient | str], *, signer: Signer) -> Self:
        """Return grants without these recipients, signed anew.

        Removed recipients may have kept the key and older grants files: seal new data under another key.

        Parameters
        ----------
        recipients : iterable of Recipient or str
            Recipients, or their ids or names; "passphrase" for the passphrase.
        signer : Signer
            The owner's signing key.

        Raises
        ------
        GrantError
            If a name or id in `recipients` is unknown.
        ValueError
            If no recipient remains.
        """
        dropped = ids_of(self, recipients)
        return self._sign(tuple(grant for grant in self.recipients if grant.id not in dropped), signer)

    def _sign(self, recipients: tuple[Grant, ...], signer: Signer) -> Self:
        if not recipients:
            raise ValueError("signing grants failed: expected at least one recipient or a passphrase, got none")
        signed = replace(self, recipients=recipients, issued=_now(), serial=self.serial + 1)
        payload = _FORMS[_version_of(signed)].write(signed)
        if len(payload) > _LIMIT // 2:
            raise ValueError(f"signing grants failed: expected at most {_LIMIT // 2} bytes, got {len(payload)}")
        _parse(Grants, payload, "grants to sign")
        return replace(signed, envelope=sign_envelope(payload, PAYLOAD_TYPE, [signer]))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, owner: Verifier | Iterable[Verifier]) -> Self:
        """Read a grants file, and verify that its owner signed it.

        Parameters
        ----------
        path : path-like
            The file.
        owner : Verifier or iterable of Verifier
            The public keys of trusted owners.

        Raises
        ------
        SignatureError
            If the file was altered, or signed by another key. None of its content was used.
        FormatError
            If the file is not a grants file.
        OSError
            If the file cannot be read.
        """
        return cls.from_bytes(_read(path), owner=owner, source=str(path))

    @classmethod
    def from_bytes(cls, content: bytes, *, owner: Verifier | Iterable[Verifier], source: str = "the grants") -> Self:
        """Read and verify the content of a grants file.

        Raise SignatureError if it was altered, or signed by another key. Raise FormatError if it is not a grants file.
        """
        if len(content) > _LIMIT:
            raise FormatError(f"{source}: expected a grants file of at most {_LIMIT} bytes, got a larger one")
        payload, _ = open_envelope(content, PAYLOAD_TYPE, owner, source=source)
        return replace(_parse(cls, payload, source), envelope=content)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, atomically. Earlier grants of this key are replaced, but no other grants, key or anchor.

        Raise OSError if the file cannot be written.
        """
        with new_file(Path(require_path(path)), succeeds=self._is_of_key) as file:
            file.write(self.envelope)

    def _is_of_key(self, content: bytes) -> bool:
        """Return True for other grants of this key."""
        try:
            payload = read_unverified_payload(content)
            return _parse(Grants, payload, "the grants").key_id == self.key_id
        except FormatError:
            return False

    def unlock(
        self, identity: Identity | None = None, *, passphrase: str | None = None, now: datetime | None = None
    ) -> KeyRing:
        """Return a ring with the granted key, restricted to the files and the set that the grant names.

        A key for a lineage, or for a least version, opens only files that are opened with an anchor of such a set.

        Parameters
        ----------
        identity : Identity, optional
            The secret key of a recipient.
        passphrase : str, optional
            The passphrase, in place of an identity.
        now : datetime.datetime, optional
            The time to compare with the end of the grant. By default the current time.

        Raises
        ------
        GrantError
            If the grant has expired, has no entry for this identity, does not open, or is a lease.
        DeviceError
            If the grant is for confidential GPUs, and this process has opened another GPU.
        TypeError
            If neither an identity nor a passphrase is given.
        """
        if identity is None and passphrase is None:
            raise TypeError("unlocking grants failed: expected an identity or passphrase=, got neither")
        if self.seconds is not None:
            raise GrantError(
                f"opening a grant failed: expected one for ever, got a lease of key {self.key_id} for {self.seconds} "
                "seconds; take it with fastrack.attest.lease_keys, which renews it"
            )
        return KeyRing(open_key(self, identity, passphrase=passphrase, now=now))


NO_ID = "0" * 32  # of a passphrase


def open_later(
    granted: Iterable[Grants], identity: Identity, *, now: datetime | None = None
) -> list[tuple[Grants, Callable[[], Key]]]:
    """Return grants, leases too, each with a function that opens its key. Raise GrantError if one is for another.

    What renews a lease has its keys, and opens none: each that is opened is in memory once more.
    """
    found = list(granted)
    for each in found:
        _find_entry(each, identity, now)
    return [(each, partial(open_key, each, identity, now=now)) for each in found]


def open_key(
    grants: Grants, identity: Identity | None = None, *, passphrase: str | None = None, now: datetime | None = None
) -> Key:
    """Return the key, of a lease too, by the parameters and the errors of `Grants.unlock`."""
    entry = _find_entry(grants, identity, now)
    secret: bytes | bytearray
    if identity is not None:
        secret = identity.decrypt(entry.ciphertext, _info(grants))
    else:
        assert passphrase is not None
        assert entry.parameters is not None
        secret = decrypt_with_passphrase(entry.ciphertext, passphrase, entry.parameters, _info(grants))
    wanted = f"opening a grant failed: expected key {grants.key_id} of {grants.bits} bits, got"
    try:
        key = Key.from_bytes(secret)
    except FormatError:
        raise GrantError(f"{wanted} {len(secret)} bytes that are no key") from None
    if (key.id, key.bits) != (grants.key_id, grants.bits):
        raise GrantError(f"{wanted} key {key.id} of {key.bits} bits")
    key.restrict(grants.files, grants.lineage, grants.least_version)
    key._bound = None if grants.require is None else (grants.gpus,)  # noqa: SLF001 - of this package
    return key


def _find_entry(grants: Grants, identity: Identity | None, now: datetime | None) -> Grant:
    """Return the entry for an identity, or for a passphrase. Raise the errors of `Grants.unlock`."""
    now = _now() if now is None else now
    if grants.expires is not None and now >= grants.expires:
        raise GrantError(
            f"the grant of key {grants.key_id} expired at {encode_time(grants.expires)}; ask the owner for a new one"
        )
    sought = (NO_ID, _PASSPHRASE) if identity is None else (identity.recipient.id, identity.recipient.algorithm)
    entry = next((grant for grant in grants.recipients if (grant.id, grant.algorithm) == sought), None)
    if entry is None:
        recipient = "a passphrase" if identity is None else repr(identity.recipient)
        raise GrantError(f"key {grants.key_id} was not granted to {recipient}; ask the owner to add it")
    find(PLACES["bind"])(grants.key_id, grants.require, grants.gpus)
    return entry


def open_with_environment(path: str | os.PathLike[str], content: bytes | None = None) -> KeyRing:
    """Unlock a grants file with the identity and the owner's public key that the environment names.

    Its `content`, if it is given, came from elsewhere, which `path` names in errors.
    Raise UnknownKeyError if a variable is not set, and the errors of `Grants.load`, `Grants.unlock`, `Identity.load`
    and `Verifier.load`.
    """
    paths = {variable: os.environ.get(variable) for variable in (IDENTITY_VARIABLE, OWNER_VARIABLE)}
    missing = [variable for variable, value in paths.items() if not value]
    if missing:
        raise UnknownKeyError(
            f"{path} holds grants: set {' and '.join(missing)}. {IDENTITY_VARIABLE} names the secret file of a "
            f"recipient, and {OWNER_VARIABLE} the public file of the owner"
        )
    owner = Verifier.load(paths[OWNER_VARIABLE] or "")
    grants = Grants.from_bytes(_read(path) if content is None else content, owner=owner, source=str(path))
    return grants.unlock(Identity.load(paths[IDENTITY_VARIABLE] or ""))


def read_unverified(path: str | os.PathLike[str]) -> Grants:
    """Return the content of a grants file, only for display: the signature is not checked.

    Raise FormatError if the file is not a grants file, and OSError if it cannot be read.
    """
    return _parse(Grants, read_unverified_payload(_read(path), source=str(path)), str(path))


def _read(path: str | os.PathLike[str]) -> bytes:
    with open_regular(path) as file:
        return file.read(_LIMIT + 1)


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _version_of(grants: Grants) -> int:
    return 1 + (grants.seconds is not None) + 2 * (grants.require is not None)


def _constraints(grants: Grants) -> dict[str, Any]:
    """Return the members that the wrapped keys are bound to."""
    version = _version_of(grants)
    return {**fields.write_members(grants, _MEMBERS[version]), "version": version}


def _info(grants: Grants) -> bytes:
    return _LABEL + encode(_constraints(grants))


def _parse(kind: type[G], payload: bytes, source: str) -> G:
    """Return the grants in a payload, which must be canonical."""
    with parsing(f"{source} is not a grants file", "get it again from its owner"):
        # The last member of canonical JSON; each form refuses any other.
        last = (version for version in _FORMS if payload.endswith(b'"version":%d}' % version))
        grants = kind(**_FORMS[next(last, 1)].parse(payload))
        recipients, info_size = grants.recipients, len(_info(grants))
        require(all(info_size <= INFO_LIMITS.get(grant.algorithm, info_size) for grant in recipients), "files")
        require(0 < len({grant.id for grant in recipients}) == len(recipients), "recipients")
        require(grants.seconds is None or (grants.renew_after or 0) < grants.seconds, "renew_after")
        return grants


def _write_grant(grant: Grant) -> dict[str, Any]:
    parameters = {} if grant.parameters is None else fields.write_members(grant.parameters, _PARAMETERS)
    return {**fields.write_members(grant, _GRANT), **parameters, **grant.more}


def _read_grant(entry: Any) -> Grant:
    algorithm = fields.member_of("algorithm", fields.TEXT).read(entry)
    known = {**_GRANT, **_PARAMETERS} if algorithm == _PASSPHRASE else _GRANT
    more = {} if algorithm in _KNOWN else {name: entry[name] for name in entry.keys() - known.keys()}
    members = fields.read_members({name: entry[name] for name in entry.keys() - more.keys()}, known)
    parameters = None
    if algorithm == _PASSPHRASE:
        parameters = PassphraseParameters(**{name: members.pop(name) for name in _PARAMETERS})
        parameters.check()
    if (members["id"] == NO_ID) != (parameters is not None):
        raise FieldError("32 zeros for a passphrase, and only for one", "others", "id")
    f"{algorithm}{members['name']}".encode()  # refuses lone surrogates
    return Grant(**members, parameters=parameters, more=more)


_ANY_BYTES = fields.binary(_LIMIT, least=0)
_PARAMETER = Field(lambda value: value)  # the parameters check themselves
_PARAMETERS: Fields = {"salt": _ANY_BYTES, "iterations": _PARAMETER, "lanes": _PARAMETER, "memory": _PARAMETER}
_GRANT: Fields = {"algorithm": fields.TEXT, "id": fields.ID, "name": fields.TEXT, "ciphertext": _ANY_BYTES}
_RECIPIENTS = fields.list_of(Field(_read_grant, _write_grant), _RECIPIENTS_LIMIT)
_SIGNED: Fields = {"recipients": _RECIPIENTS, "issued": fields.TIME, "serial": fields.NUMBER}
_FORMS = {version: Form({**_SIGNED, **members}, {"version": version}) for version, members in _MEMBERS.items()}


def ids_of(grants: Grants, recipients: Iterable[Recipient | str]) -> set[str]:
    """Return the ids of recipients, by themselves, their ids or names. Raise GrantError for one that has no grant."""
    ids = set()
    for recipient in recipients:
        name = recipient.id if isinstance(recipient, Recipient) else recipient
        name = NO_ID if name == "passphrase" else name
        found = {grant.id for grant in grants.recipients if name in {grant.id, grant.name}}
        if not found:
            known = ", ".join("passphrase" if each.id == NO_ID else each.name or each.id for each in grants.recipients)
            raise GrantError(
                f"removing a recipient failed: expected the name or the id of one, got {name!r:.80}; the grants are "
                f"for {known:.300}"
            )
        ids |= found
    return ids
