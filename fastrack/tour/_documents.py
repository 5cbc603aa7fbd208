"""The signed documents of a tour: plan, delegation, consent, receipt and completion. ``docs/format.md`` has the format.

Each is a DSSE envelope with one signature, whose payload is canonical JSON. A document is known by its digest, the
SHA-256 of its payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import ClassVar, Self

from fastrack._documents import fields
from fastrack._documents.canonical import NUMBER_LIMIT, parsing, require
from fastrack._documents.fields import DIGEST, ID, NUMBER, TIME, Field, FieldError, Fields, Form
from fastrack._keys.signing import VERIFIER, Signer, Verifier, open_canonical, sign_envelope
from fastrack._util.gate import admit, most_bytes
from fastrack.errors import RollbackError

MODEL = "model.safetensors"
"""The name of the model in its folder, and in its manifest."""

KIND = "document of a tour"
"""The kind of both, an envelope and its payload, for `admit`."""
VISITS_LIMIT = 10_000
FILES_LIMIT = 4096  # of a consent, and of the files that a visit opens: a receipt has both lists
_HOLDERS_LIMIT = 1024
_FORMAT = {"format": 1}


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A version of the model: the number and the digest of its manifest.

    Examples
    --------
    >>> from fastrack import tour
    >>> tour.ModelVersion(3, "ab" * 32).number
    3
    """

    number: int
    digest: str

    def __str__(self) -> str:
        return f"version {self.number} with digest {self.digest:.16}…"


def version_of_model(number: Field[int]) -> Field[ModelVersion]:
    """Return the field of a version of the model: a list of its number, which has a field, and its digest."""

    def read(value: object) -> ModelVersion:
        if type(value) is not list or len(value) != 2:
            raise FieldError("the number and the digest of a version", type(value).__name__)
        return ModelVersion(fields.read_at("[0]", number, value[0]), fields.read_at("[1]", DIGEST, value[1]))

    return Field(read, lambda model: [model.number, model.digest])


_MODEL = version_of_model(fields.integer(1, NUMBER_LIMIT - 1))
_NAME = fields.text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "the name of a holder")
_HOLDERS = fields.mapping(_NAME, VERIFIER, _HOLDERS_LIMIT)
_ORDER = fields.list_of(_NAME, VISITS_LIMIT)
_FILES = fields.list_of(ID, FILES_LIMIT)
_ENVELOPE = fields.binary(most_bytes(KIND), least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The base of the documents: signed once, in one form. `sign` and `from_bytes` give an `envelope`.

    The digest is the SHA-256 of the signed content, in hexadecimal; `issuer` is the key that signed it.
    """

    KIND: ClassVar[str]
    FIELDS: ClassVar[Fields]

    digest: str = field(default="", compare=False)
    envelope: bytes = field(default=b"", repr=False, compare=False)
    issuer: Verifier | None = field(default=None, compare=False)

    @classmethod
    def _type(cls) -> str:
        return f"application/vnd.fastrack.tour.{cls.KIND}.v1+json"

    def sign(self, signer: Signer) -> Self:
        """Return this document with its envelope, signed by a key. Raise `FormatError` if its values are not valid."""
        payload = Form(self.FIELDS, _FORMAT).write(self)
        return self._parse(payload, sign_envelope(payload, self._type(), [signer]), signer.verifier, "a new document")

    @classmethod
    def from_bytes(cls, envelope: bytes, *, signer: Verifier, source: str = "") -> Self:
        """Read a document, and verify that a key signed it.

        Raise `SignatureError` if another key signed it or it was altered, and `FormatError` if it has another form.
        """
        source = source or f"the {cls.KIND} of a tour"
        admit(envelope, KIND, name=source)
        payload, issuer = open_canonical(envelope, cls._type(), signer, source=source)
        return cls._parse(payload, bytes(envelope), issuer, source)

    @classmethod
    def _parse(cls, payload: bytes, envelope: bytes, issuer: Verifier, source: str) -> Self:
        with parsing(f"{source} is not the {cls.KIND} of a tour", "get it again from its owner"):
            admit(payload, KIND)
            values = Form(cls.FIELDS, _FORMAT).parse(payload)
            document = cls(**values, digest=sha256(payload).hexdigest(), envelope=envelope, issuer=issuer)
            document._check()
        return document

    def _check(self) -> None:
        """Raise ValueError for values that do not fit each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """The policy of a tour, which the owner of the model signs and each holder accepts by its digest.

    Attributes
    ----------
    tour, lineage : str
        The ids of the tour, and of the model through all its versions: 32 hexadecimal digits.
    start : ModelVersion
        The model that the first visit begins with.
    holders : mapping of str to Verifier
        The names of the holders, and the public keys by which they sign.
    order : tuple of str
        The holder of each visit. A name may come several times.
    seconds : int
        The time limit of a visit, from its grant to its receipt.
    attempts : int
        How often a visit may be begun in all, counting the visits that were broken off.
    code : str
        The SHA-256 of the training code, from `code_digest`.
    issued, expires : datetime.datetime
        The times when it was signed, and after which no visit begins, in UTC.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import tour
    >>> from fastrack.grants import Signer
    >>> owner, clinic = Signer.generate(), Signer.generate()
    >>> day = datetime(2026, 6, 1, tzinfo=UTC)
    >>> plan = tour.Plan(
    ...     tour="1" * 32, lineage="2" * 32, start=tour.ModelVersion(1, "3" * 64), holders={"clinic": clinic.verifier},
    ...     order=("clinic", "clinic"), seconds=600, attempts=3, code="4" * 64, issued=day, expires=day.replace(day=2),
    ... ).sign(owner)
    >>> tour.Plan.from_bytes(plan.envelope, signer=owner.verifier) == plan
    True
    """

    KIND = "plan"
    FIELDS: ClassVar = {
        "tour": ID, "lineage": ID, "start": _MODEL, "holders": _HOLDERS, "order": _ORDER, "seconds": NUMBER,
        "attempts": NUMBER, "code": DIGEST, "issued": TIME, "expires": TIME,
    }  # fmt: skip

    tour: str
    lineage: str
    start: ModelVersion
    holders: Mapping[str, Verifier]
    order: tuple[str, ...]
    seconds: int
    attempts: int
    code: str
    issued: datetime
    expires: datetime

    __hash__ = object.__hash__

    @property
    def owner(self) -> Verifier:
        """The public key of the owner of the model, who signed the plan."""
        if self.issuer is None:
            raise ValueError("reading the owner of a plan failed: expected a signed plan, got one without. Sign it")
        return self.issuer

    def holder(self, visit: int) -> str:
        """Return the name of the holder of a visit. Raise `RollbackError` if the tour has no such visit."""
        if not 0 <= visit < len(self.order):
            raise RollbackError(
                f"visit {visit} of tour {self.tour}: expected one of its {len(self.order)}, got another. The tour is "
                "over; finish it, or sign a new plan"
            )
        return self.order[visit]

    def _check(self) -> None:
        require(self.order and set(self.order) == set(self.holders), "order")
        keys = [verifier.id for verifier in self.holders.values()]
        require(len(set(keys)) == len(keys), "holders")  # two names for one key would be one holder
        require(0 < self.seconds < 1 << 31 and 0 < self.attempts < 1 << 16, "limits")
        require(self.issued < self.expires, "expires")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegation(Document):
    """The owner's statement that a key signs for one attempt at one visit, and from which receipt and model on.

    Attributes
    ----------
    plan : str
        The digest of the plan.
    visit, attempt : int
        The visit, counted from 0, and the attempt at it, counted from 1.
    previous : str
        The digest of the receipt before, or of the plan at the first visit.
    before : ModelVersion
        The model that the visit begins with.
    signer : Verifier
        The key, which was made for this attempt and never leaves the process that has proved itself.
    key, salt : str
        The id of the fresh key that the next version is sealed under, and 64 hexadecimal digits that the owner derives
        this key from, with its own key: see `model_key`.
    expires : datetime.datetime
        The end of the visit.

    Examples
    --------
    >>> from fastrack import tour
    >>> sorted(tour.Delegation.FIELDS)
    ['attempt', 'before', 'expires', 'key', 'plan', 'previous', 'salt', 'signer', 'visit']
    """

    KIND = "delegation"
    FIELDS: ClassVar = {
        "plan": DIGEST, "visit": NUMBER, "attempt": NUMBER, "previous": DIGEST, "before": _MODEL,
        "signer": VERIFIER, "key": ID, "salt": DIGEST, "expires": TIME,
    }  # fmt: skip

    plan: str
    visit: int
    attempt: int
    previous: str
    before: ModelVersion
    signer: Verifier
    key: str
    salt: str
    expires: datetime

    def _check(self) -> None:
        require(self.attempt > 0, "attempt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent(Document):
    """A holder's statement that it granted its data to one delegation.

    Attributes
    ----------
    delegation : str
        The digest of the delegation.
    policy, offer : str
        The SHA-256 of the holder's policy of attestation, and of the offer with the evidence that it accepted.
    files : tuple of str
        The ids of the sealed files that the visit may open.
    issued, expires : datetime.datetime
        The times when it was granted, and when the grant ends.

    Examples
    --------
    >>> from fastrack import tour
    >>> sorted(tour.Consent.FIELDS)
    ['delegation', 'expires', 'files', 'issued', 'offer', 'policy']
    """

    KIND = "consent"
    FIELDS: ClassVar = {
        "delegation": DIGEST, "policy": DIGEST, "offer": DIGEST, "files": _FILES, "issued": TIME, "expires": TIME,
    }  # fmt: skip

    delegation: str
    policy: str
    offer: str
    files: tuple[str, ...]
    issued: datetime
    expires: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt(Document):
    """The statement of a visit's own key about what the visit did. A chain of receipts is the record of a tour.

    Attributes
    ----------
    delegation, consent : bytes
        The envelopes of the owner's delegation and the holder's consent.
    code : str
        The SHA-256 of the training code that ran.
    after : ModelVersion or None
        The model that the visit made; None of a visit that was broken off, whose receipt only its holder gets.
    files : tuple of str
        The ids of the holder's sealed files in the order in which they were opened.
    chunks : int
        The number of their chunks that were opened, each of which had been authenticated.
    scrubbed : int
        The bytes of the buffer that were overwritten with zeros and read back.
    started, ended : datetime.datetime
        The times when the data were opened first, and when the buffer had been read back.

    Examples
    --------
    >>> from fastrack import tour
    >>> sorted(tour.Receipt.FIELDS)
    ['after', 'chunks', 'code', 'consent', 'delegation', 'ended', 'files', 'scrubbed', 'started']
    """

    KIND = "receipt"
    FIELDS: ClassVar = {
        "delegation": _ENVELOPE, "consent": _ENVELOPE, "code": DIGEST, "after": fields.or_none(_MODEL),
        "files": _FILES, "chunks": NUMBER, "scrubbed": NUMBER, "started": TIME, "ended": TIME,
    }  # fmt: skip

    delegation: bytes = field(repr=False)
    consent: bytes = field(repr=False)
    code: str
    after: ModelVersion | None
    files: tuple[str, ...]
    chunks: int
    scrubbed: int
    started: datetime
    ended: datetime

    def _check(self) -> None:
        require(self.started <= self.ended, "ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Document):
    """The owner's statement that a tour ended with one receipt and one model. It is the end of a chain.

    Attributes
    ----------
    plan, head : str
        The digests of the plan and of the last receipt.
    visits : int
        The number of visits.
    model : ModelVersion
        The model that the tour made.
    issued : datetime.datetime
        The time.

    Examples
    --------
    >>> from fastrack import tour
    >>> sorted(tour.Completion.FIELDS)
    ['head', 'issued', 'model', 'plan', 'visits']
    """

    KIND = "completion"
    FIELDS: ClassVar = {
        "plan": DIGEST, "head": DIGEST, "visits": NUMBER, "model": _MODEL, "issued": TIME,
    }  # fmt: skip

    plan: str
    head: str
    visits: int
    model: ModelVersion
    issued: datetime


for _class in (ModelVersion, Plan, Delegation, Consent, Receipt, Completion):
    _class.__module__ = "fastrack.tour"
