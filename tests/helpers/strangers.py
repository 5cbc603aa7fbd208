"""Places where a document arrives whose sender has proved nothing, and hostile documents in twelve shapes for them."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import fastrack
from fastrack import attest, tour
from fastrack._cli.attest.exchange import _describe_document
from fastrack._keys.signing import read_unverified_payload
from fastrack._net.connections import Answer
from fastrack._net.service import read_refusal
from fastrack._samples.shard_index import ShardIndex
from fastrack._sealed.file_header import encode_header
from fastrack._service.limits import RateLimit
from fastrack._sets.manifest import PAYLOAD_TYPE, Manifest
from fastrack.attest import _exchange, _verify_offer
from fastrack.attest._broker import ledger, service
from fastrack.attest._broker.app import make_app as make_broker_app
from fastrack.attest._cpu.event_log import EventLog
from fastrack.attest._fetch import collateral as fetching
from fastrack.grants import Grants, Identity, Signer
from fastrack.tour import _app, _documents, _folder, _messages, _request
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots
from helpers.sealed_files import write_file
from helpers.vendor_services import VendorServices, manifest_answer

Make = Callable[[bytes], bytes]


# Documents in twelve shapes, each in the formats that have it, the most usual one first.


def fill(head: bytes, part: bytes, tail: bytes, size: int) -> bytes:
    """Repeat a part, with a number in the place of ``@``, between a head and a tail."""
    count = (size - len(head) - len(tail)) // len(part.replace(b"@", b"10000"))
    if b"@" not in part:
        return head + part * count + tail
    return head + b"".join(part.replace(b"@", b"%d" % number) for number in range(10_000, 10_000 + count)) + tail


def nest(opening: bytes, closing: bytes, size: int) -> bytes:
    """Nest a list or an element in itself."""
    count = size // len(opening + closing)
    return opening * count + closing * count


def nest_der(size: int) -> bytes:
    """Nest sequences, each with its length in four bytes."""
    return b"".join(b"\x30\x84" + (6 * below).to_bytes(4) for below in reversed(range(size // 6)))


def sequence(part: bytes, size: int) -> bytes:
    """Repeat a value in a sequence of DER."""
    content = part * ((size - 6) // len(part))
    return b"\x30\x84" + len(content).to_bytes(4) + content


def inherit(size: int) -> bytes:
    """Declare many namespaces, and another one in each of many elements below."""
    return fill(fill(b"<a", b' xmlns:p@="u"', b">", size // 2), b'<b xmlns:q="v"/>', b"</a>", size)


PEM = b"-----BEGIN CERTIFICATE-----\nMAAA\n-----END CERTIFICATE-----\n"
DIGITS = b"7" * 1000  # of an integer that Python reads; more than 4300 it refuses
SHAPES: dict[str, dict[str, Callable[[int], bytes]]] = {
    "nesting": {"json": partial(nest, b"[", b"]"), "xml": partial(nest, b"<a>", b"</a>"), "der": nest_der},
    "tiny values": {
        "json": partial(fill, b"[", b"0,", b"0]"),
        "xml": partial(fill, b"<a>", b"<b/>", b"</a>"),
        "der": partial(sequence, b"\x05\x00"),
    },
    "members": {
        "json": partial(fill, b"{", b'"@":0,', b'"a":0}'),
        "xml": partial(fill, b"<a", b' a@=""', b"/>"),
        "der": partial(sequence, b"\x30\x05\x06\x01\x2a\x05\x00"),
    },
    "lines": {
        "text": partial(fill, b"", b"a\n", b""),
        "json": partial(fill, b"[", b"\n", b"]"),
        "xml": partial(fill, b"<a>", b"<b/>\n", b"</a>"),
    },
    "long numbers": {
        "json": lambda size: fill(b"[", DIGITS + b",", b"1e9]", size),
        "xml": partial(fill, b"<a>", b"&#0000000000000000000000049;", b"</a>"),
        "der": lambda size: b"\x02\x84" + (size - 6).to_bytes(4) + b"\x7f" * (size - 6),
    },
    "namespaces": {"xml": inherit, "json": partial(fill, b"{", b'"xmlns:p@":"u",', b'"a":"u"}')},
    "certificates": {
        "text": partial(fill, b"", PEM, b""),
        "json": partial(fill, b"[", b'"MAAA",', b'""]'),
        "xml": partial(fill, b"<a>", b"<X509Certificate>MAAA</X509Certificate>", b"</a>"),
    },
    "manifests": {
        "json": partial(fill, b"[", b'{"data":"AA==","ocsp":null},', b'{"data":"AA==","ocsp":null}]'),
        "xml": partial(fill, b"<a>", b'<Resource type="Measurement"/>', b"</a>"),
    },
    "files": {
        "json": partial(fill, b"[", b'"000000000000000000000000000@",', b'""]'),
        "xml": partial(fill, b"<a>", b'<File name="@"/>', b"</a>"),
    },
    "deep lists": {
        "json": partial(fill, b"[", b"[[[[[[[[]]]]]]]],", b"[]]"),
        "xml": partial(fill, b"<a>", b"<b><b><b><b/></b></b></b>", b"</a>"),
    },
    "repeated members": {
        "json": partial(fill, b"{", b'"a":0,', b'"a":0}'),
        "xml": partial(fill, b"<a", b' b=""', b"/>"),
    },
    "escapes": {
        "json": partial(fill, b'"', rb"\u00e9", b'"'),
        "xml": partial(fill, b"<a>", b"&amp;", b"</a>"),
        "text": partial(fill, b"", b"%25", b""),
    },
}


# The places.

WHOLE: tuple[tuple[str, Make], ...] = (("json", bytes), ("text", bytes))


@dataclass(frozen=True)
class Place:
    """An entry point. `slots` make a document of a hostile part, and have the format of that part first.

    `limit` is the most bytes that it reads, or 8 MiB, and `most` the memory that a byte of a document may take.
    """

    name: str
    run: Callable[[bytes], object]
    slots: tuple[tuple[str, Make], ...] = WHOLE
    limit: int = 1 << 20
    most: int = 16

    def documents(self, size: int) -> list[Document]:
        """Return all hostile documents of up to some size."""
        return [
            self._document(shape, number, formats[form], size)
            for shape, formats in SHAPES.items()
            for number, (form, _) in enumerate(self.slots)
            if form in formats
        ]

    def some_documents(self, size: int) -> list[Document]:
        """Return one document of each shape, in the most usual format that it has here, in the slots by turns."""
        chosen = []
        for turn, (shape, formats) in enumerate(SHAPES.items()):
            form = next(form for form in formats if form in dict(self.slots))
            numbers = [number for number, (each, _) in enumerate(self.slots) if each == form]
            chosen.append(self._document(shape, numbers[turn % len(numbers)], formats[form], size))
        return chosen

    def _document(self, shape: str, number: int, part: Callable[[int], bytes], size: int) -> Document:
        make = self.slots[number][1]
        is_whole = make is bytes
        # Base64 in base64 makes 1.8 times as much of a part.
        return Document(shape, number, is_whole, lambda: make(part(size if is_whole else size // 2)))


class Document(NamedTuple):
    """A hostile document: its shape, the slot of its hostile part, whether all of it is that, and what makes it.

    Some hold a challenge, which is used up, so that each is made when it is needed.
    """

    shape: str
    slot: int
    is_whole: bool
    make: Callable[[], bytes]


class World:
    """A broker, two desks, their files below a folder, and all `places` where they and others read documents."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key, self.signer = folder, fastrack.Key.generate(), Signer.generate()
        rules = attest.Policy.from_toml(policy(1))
        settings = service.Settings(rules, roots=roots(), clock=lambda: NOW)
        keys, log = fastrack.KeyRing(self.key), ledger.Ledger(folder / "broker.db")
        self.broker = service.Broker(settings, keys, self.signer, log)
        self.challenge = attest.Challenge.generate(now=NOW, lifetime=timedelta(days=1))
        self.machine = Machine("tdx", 1, is_small=True)
        self.recipient = Identity.generate("MLKEM768_X25519").recipient
        self.plan = _plan(self.signer, self.signer)
        terms = tour.Terms.from_toml(policy(1), roots=roots(), clock=lambda: NOW)
        given = {"terms": terms, "signer": self.signer}
        ledgers = [tour.TourLedger(folder / f"{name}.db") for name in ("owner", "holder")]
        self.desks = {
            "owner": tour.OwnerDesk(self.plan, self.key, ledger=ledgers[0], **given),
            "holder": tour.HolderDesk(self.plan, [self.key], files=["0" * 32], ledger=ledgers[1], **given),
        }
        limit = RateLimit(1e9, 1 << 30)
        self.apps = {name: partial(_app.make_app, desk, limit=limit) for name, desk in self.desks.items()}
        self.apps["broker"] = partial(make_broker_app, self.broker, limit=limit)
        kinds = (_brokers, _machines, _fetches, _desks, _visitors, _files)
        self.places = [place for kind in kinds for place in kind(self)]

    def offer(self, challenge: attest.Challenge, *, gpu: dict[str, object] | None = None, **cpu: object) -> bytes:
        """Make an offer of which the CPU proves all, with other parts of the GPU or of the CPU's collateral."""
        binding = attest.OfferBinding(challenge, self.recipient)
        devices = tuple(replace(device, **(gpu or {})) for device in self.machine.collect(binding).devices)
        proof = self.machine.prove(binding.report_data(devices))
        if log := cpu.pop("event_log", None):
            proof = replace(proof, event_log=log)
        proof = replace(proof, collateral=replace(proof.collateral, **cpu))
        return attest.Offer(challenge.id, self.recipient, attest.MachineEvidence(proof, devices)).to_bytes()

    def begin(self, desk: str, **parts: Callable[[_request.VisitRequest], bytes]) -> bytes:
        """Make the message of a visitor that a desk has challenged, with other parts, each made for its request."""
        challenge = attest.Challenge.from_bytes(self.desks[desk].ask("challenge"))
        chain = tour.Chain(self.plan)
        request = _request.VisitRequest.of(chain, (challenge,), self.plan.code, Signer.generate().verifier)
        given = {"previous": chain.head, "before": chain.model, "signer": request.signer, "expires": self.plan.expires}
        delegation = tour.Delegation(plan=self.plan.digest, visit=0, attempt=1, key="5" * 32, salt="6" * 64, **given)
        own = {
            "chain": lambda _: chain.to_bytes(),
            "delegation": lambda _: delegation.sign(self.signer).envelope,
            "offer": lambda request: self.offer(request.challenge),
            "request": _request.VisitRequest.to_bytes,
        }
        return _messages.pack("begin", **{name: make(request) for name, make in {**own, **parts}.items()})

    def behind_plan(self, payload: bytes) -> bytes:
        """Return a chain whose first receipt has a payload."""
        return self.plan.envelope + envelope(payload) + b"\n"

    def run_on_file(self, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        """Return a function that reads a document from a file."""
        path = self.folder / "document.safetensors"

        def run(document: bytes) -> object:
            path.write_bytes(document)
            return read(path)

        return run


def _plan(owner: Signer, holder: Signer) -> tour.Plan:
    return tour.Plan(
        tour="1" * 32,
        lineage="2" * 32,
        start=tour.ModelVersion(1, "3" * 64),
        holders={"clinic": holder.verifier},
        order=("clinic",),
        seconds=600,
        attempts=3,
        code="4" * 64,
        issued=NOW,
        expires=NOW + timedelta(days=1),
    ).sign(owner)


def member(document: bytes, *path: str | int) -> Make:
    """Return a function that puts a hostile value in the place of one in a document of JSON."""
    content = inner = json.loads(document)
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = "@@"
    head, tail = (json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n").encode().split(b'"@@"')
    return lambda value: head + value + tail


def envelope(payload: bytes, kind: str = "application/json") -> bytes:
    """Return a DSSE envelope that no key signed."""
    entry = {"keyid": "0" * 16, "sig": base64.b64encode(bytes(64)).decode()}
    head = json.dumps({"payloadType": kind, "signatures": [entry]}, separators=(",", ":")).encode()
    return b'{"payload":"%s",%s' % (base64.b64encode(payload), head[1:])


def rim(data: bytes) -> dict[str, object]:
    """Return the part of a GPU's evidence that has a manifest."""
    return {"manifests": (attest.ManifestEvidence(data, None),)}


def post(make_app: Callable[[], Any], path: str, body: bytes) -> bytes:
    """Post a body to a new application, in pieces as from a socket, and return its answer."""
    pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)] or [b""]
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("127.0.0.2", 1)}
    sent = bytearray()

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: dict[str, bytes]) -> None:
        sent.extend(message.get("body", b""))

    asyncio.run(make_app()({**scope, "query_string": b""}, receive, send))
    return bytes(sent)


def _brokers(world: World) -> list[Place]:
    app = world.apps["broker"]

    def offering(make: Callable[[attest.Challenge, bytes], bytes]) -> Make:
        return lambda part: make(world.broker.make_challenge(), part)

    def within(*path: str | int) -> tuple[str, Make]:
        return "json", offering(lambda challenge, part: member(world.offer(challenge), *path)(part))

    slots = (
        *WHOLE,
        within("cpu"),
        within("devices"),
        within("manifests"),
        ("xml", offering(lambda challenge, part: world.offer(challenge, gpu=rim(part)))),
        ("text", offering(lambda challenge, part: world.offer(challenge, gpu={"chain": part}))),
        ("der", offering(lambda challenge, part: world.offer(challenge, gpu={"ocsp": (part,)}))),
        ("json", offering(lambda challenge, part: world.offer(challenge, tcb_info=part))),
        ("json", offering(lambda challenge, part: world.offer(challenge, event_log=part))),
        ("der", offering(lambda challenge, part: world.offer(challenge, pck_crl=part))),
    )
    return [
        Place("broker, challenges", partial(post, app, "/v1/challenges")),
        Place("broker, offers", partial(post, app, "/v1/offers"), slots, attest._offer.OFFER_LIMIT),
    ]


def _machines(world: World) -> list[Place]:
    kept, genuine = world.folder / "collateral", world.offer(world.challenge)
    services = _services(world.machine)
    _fetch(services, attest.Offer.from_bytes(genuine).evidence, kept)

    def prove(document: bytes) -> object:
        return _verify_offer.prove_offer(attest.Offer.from_bytes(document), world.challenge, NOW, kept, roots())

    slots = (
        *WHOLE,
        ("json", member(genuine, "manifests")),
        ("xml", lambda part: world.offer(world.challenge, gpu=rim(part))),
        ("text", lambda part: world.offer(world.challenge, gpu={"chain": part})),
    )
    grants = b'{"challenge":"%s","grants":"","kind":"fastrack/grants","version":1}\n' % (b"0" * 32)
    return [
        Place("attest verify and grant", prove, slots, attest._offer.OFFER_LIMIT),
        Place(
            "attest show",
            lambda document: _describe_document(document, "FILE"),
            (*WHOLE, ("json", member(genuine, "cpu"))),
        ),
        Place("an event log", EventLog.parse),
        Place("a machine, challenge", attest.Challenge.from_bytes),
        Place("a machine, grants", _exchange.read_envelopes, (*WHOLE, ("json", member(grants, "grants")))),
        Place("a machine, refusals", read_refusal),
    ]


RIM_ID = b"the id of the manifest"


def _services(machine: Machine) -> VendorServices:
    """Return the answers of services, without a server."""
    services = VendorServices(machine)
    services._server.server_close()
    return services


class _Vendors:
    """The answers of vendors' services, in the place of a client that asks them, one of them hostile."""

    def __init__(self, services: VendorServices, path: str, body: bytes) -> None:
        self._services, self._path, self._body = services, path, body

    def ask(self, url: str, *, limit: int, body: bytes | None = None, kind: str | None = None) -> Answer:
        path = url.partition("?")[0].removeprefix(self._services.base) or "/"
        _, headers, content = self._services.respond(path, body or b"")
        if self._path and self._path in {path, path.rpartition("/")[0]}:
            content = self._body.replace(RIM_ID, path.rpartition("/")[2].encode())
        return Answer(content[:limit], {name.lower(): value for name, value in headers.items()})


def _fetch(
    services: VendorServices, evidence: attest.MachineEvidence, folder: Path, path: str = "", body: bytes = b""
) -> None:
    vendors = _Vendors(services, path, body)
    with mock.patch.object(fetching, "Client", return_value=vendors):
        list(attest.fetch_collateral(evidence, folder, now=NOW, roots=roots(), services=services.services))


def _fetches(world: World) -> list[Place]:
    """Return a place for each answer of the services of vendors."""
    machines = {"tdx": world.machine, "snp": Machine("snp", 0)}
    services = {cpu: _services(machine) for cpu, machine in machines.items()}
    binding = attest.OfferBinding(world.challenge, world.recipient)
    evidence = {cpu: machine.collect(binding) for cpu, machine in machines.items()}

    def answer(name: str, cpu: str, path: str, *slots: tuple[str, Make]) -> Place:
        target = world.folder / f"fetched-{cpu}"

        def run(body: bytes) -> None:
            shutil.rmtree(target, ignore_errors=True)
            _fetch(services[cpu], evidence[cpu], target, path, body)

        return Place(f"fetch, {name}", run, (*WHOLE, *slots))

    tcb, identity = "/tdx/certification/v4/tcb", "/tdx/certification/v4/qe/identity"
    info = services["tdx"].respond(tcb, b"")[2]
    return [
        answer("Intel's TCB info", "tdx", tcb, ("json", member(info, "tcbInfo"))),
        answer("Intel's identity of the enclave", "tdx", identity),
        answer("Intel's revocation list", "tdx", "/sgx/certification/v4/pckcrl", ("der", bytes)),
        answer("a manifest", "tdx", "/v1/rim", ("xml", lambda part: manifest_answer(RIM_ID.decode(), part))),
        answer("an OCSP response", "tdx", "/", ("der", bytes)),
        answer("AMD's certificates", "snp", "/vcek/v1/Milan/cert_chain", ("der", bytes)),
        answer("AMD's revocation list", "snp", "/vcek/v1/Milan/crl", ("der", bytes)),
    ]


def _desks(world: World) -> list[Place]:
    apps = world.apps

    def begin(desk: str) -> Place:
        def beginning(part: str, make: Make = bytes) -> Make:
            return lambda hostile: world.begin(desk, **{part: lambda _: make(hostile)})

        slots = (
            *WHOLE,
            ("text", beginning("chain")),
            ("json", beginning("chain", world.behind_plan)),
            ("json", beginning("chain", envelope)),
            ("json", beginning("request")),
            ("json", beginning("offer")),
            ("json", beginning("delegation", envelope)),
            ("xml", lambda part: world.begin(desk, offer=lambda own: world.offer(own.challenge, gpu=rim(part)))),
        )
        return Place(f"{desk}'s desk, begin", partial(post, apps[desk], "/v1/tour/begin"), slots, 8 << 20)

    finish = ("json", lambda part: _messages.pack("finish", chain=world.plan.envelope, manifest=envelope(part)))
    return [
        *map(begin, world.desks),
        *(
            Place(f"{desk}'s desk, challenge", partial(post, app, "/v1/tour/challenge"))
            for desk, app in apps.items()
            if desk in world.desks
        ),
        Place("holder's desk, end", partial(post, apps["holder"], "/v1/tour/end"), (*WHOLE, ("json", envelope))),
        Place("owner's desk, finish", partial(post, apps["owner"], "/v1/tour/finish"), (*WHOLE, finish), 8 << 20),
    ]


def _visitors(world: World) -> list[Place]:
    def files(**contents: bytes) -> bytes:
        return json.dumps(
            [base64.b64encode(contents.get(name, b"")).decode() for name in ("model", "manifest", "chain")]
        ).encode()

    def verify(document: bytes) -> object:
        contents = [np.frombuffer(base64.b64decode(each), np.uint8) for each in json.loads(document)]
        return _folder.verify_files(dict(zip(_folder.FILES, contents, strict=True)), world.signer.verifier)

    of_nvflare = (
        ("text", lambda part: files(chain=part)),
        ("json", lambda part: files(chain=world.behind_plan(part))),
        ("json", lambda part: files(chain=world.plan.envelope, manifest=envelope(part))),
    )
    consent = partial(_documents.Consent.from_bytes, signer=world.signer.verifier)
    return [
        Place("NVFlare and a folder of a tour", verify, of_nvflare, 8 << 20),
        Place("a visitor, delegated", partial(_messages.unpack, "delegated")),
        Place("a visitor, consented", partial(_messages.unpack, "consented")),
        Place("a visitor, finished", partial(_messages.unpack, "finished")),
        Place("a visitor, grants", _messages.read_grants),
        Place("a visitor, consent", consent, (*WHOLE, ("json", envelope))),
    ]


def _files(world: World) -> list[Place]:
    def header(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text

    ids = {"fastrack.file": "0" * 32, "fastrack.key": "0" * 32}

    def layouts(text: bytes) -> bytes:
        return encode_header({}, {"fastrack.version": "1", **ids, "fastrack.tensors": text.decode()})

    def index(text: bytes) -> bytes:
        sealed = {"shards": np.frombuffer(zlib.compress(text), np.uint8)}
        write_file(sealed, world.folder / "index", world.key, kind="index", file_id="7" * 32)
        return text  # the size of what is inflated counts

    def read_index(_: bytes) -> object:
        return ShardIndex.read(world.folder / "index", fastrack.KeyRing(world.key))

    def manifest(document: bytes) -> object:
        return Manifest.from_bytes(document, owner=world.signer.verifier)

    signed = (*WHOLE, ("json", envelope))
    return [
        # A header may be any writer's, and is no longer than its file: 100 MB at most.
        Place(
            "a sealed file",
            world.run_on_file(fastrack.load_file),
            (*WHOLE, ("json", header), ("json", layouts)),
            most=48,
        ),
        Place("an index of a dataset", read_index, (("json", index), ("text", index)), 8 << 20),
        Place("a manifest", manifest, (*signed, ("json", partial(envelope, kind=PAYLOAD_TYPE)))),
        Place("a grants file", partial(Grants.from_bytes, owner=world.signer.verifier), signed),
        Place("an unverified payload", read_unverified_payload, signed),
    ]
