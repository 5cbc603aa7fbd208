"""Cases of tests/testkit, read by fastrack as its users would.

Blocks, messages between ranks and the bytes of columns have no public function that returns them: their classes are
called as the functions call them that have.
"""

import base64
import hmac
import json
import os
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
from cryptography.hazmat.primitives.hashes import SHA1, SHA256
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap
from cryptography.hazmat.primitives.serialization import load_der_private_key

import fastrack
from fastrack import attest, errors, tour
from fastrack._crypto.engine import get_engine
from fastrack._keys.wrapped import WRAPPERS, find, require_algorithm
from fastrack._samples import blocks, stored
from fastrack._sealed.file_header import GUARD
from fastrack.distributed._session import LATER_SIZE, GroupSession, Route
from fastrack.format import HEADER_SIZE, message_size
from fastrack.grants import Grants, Identity, Recipient, Signer, Verifier
from fastrack.kv import BlockContext, BlockSealer
from fastrack.providers import KeyWrapper, WrappedKey

CLASSES = {
    errors.FormatError: "format",
    errors.UnknownKeyError: "unknown-key",
    errors.RollbackError: "rollback",  # before its base
    errors.AuthenticationError: "authentication",
    errors.SignatureError: "signature",
    errors.GrantError: "grant",
    errors.AttestationError: "attestation",
}
NULL = b"\xff" * 8


def read(case):
    """Return the result of a case and "success", or None and the class of the failure."""
    try:
        with TemporaryDirectory() as folder, _private_files():
            return READERS[case.kind](case, Path(folder)), "success"
    except tuple(CLASSES) as error:
        return None, next(name for kind, name in CLASSES.items() if isinstance(error, kind))


@contextmanager
def _private_files():
    mask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(mask)


def _place(case, folder):
    """Write the payload, or each of its files, and return the folder or file."""
    for name, content in case.files().items():
        (folder / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "set" / name).write_bytes(content)
    if case.files():
        return folder / "set"
    path = folder / "file.safetensors"
    path.write_bytes(case.payload)
    return path


def _keys(case):
    return [fastrack.Key.from_bytes(bytes.fromhex(value)) for value in case.all("key")]


def _owners(case):
    return [Verifier.parse(line) for line in case.all("owner")]


def _time(case):
    return datetime.strptime(case.get("time"), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def _described(dtype, shape, content):
    return {"dtype": dtype, "shape": list(shape), "sha256": sha256(content).hexdigest()}


# Sealed files.


def _sealed(case, folder):
    path = _place(case, folder)
    with fastrack.load_file(path) as file:
        if file.kind != case.get("as"):
            raise errors.FormatError(f"expected a {case.get('as')}, got a {file.kind}")
        if file.kind == "checkpoint" and file.plain:  # as `load_checkpoint` tells by the skeleton
            raise errors.FormatError("expected no plain tensors in a checkpoint")
        tensors, keys = {}, _keys(case)
        names = [name for name in file if name != GUARD]  # a name that no file is written with
        if names:
            fastrack.unseal_file(file, folder / "plain.safetensors", keys, names=names)
            with fastrack.load_file(folder / "plain.safetensors") as plain:
                tensors = {name: _described(*plain.stored(name)) for name in plain.plain}
        if GUARD in file:
            sealed = file[GUARD]
            plain = fastrack.unseal(sealed, keys, framework="numpy").tobytes()
            tensors[GUARD] = _described(sealed.dtype, sealed.shape, plain)
        return {
            "tensors": tensors,
            "plain": {name: _described(*file.stored(name)) for name in file.plain},
            "metadata": dict(file.metadata),
        }


def _widened(case, folder):
    with fastrack.load_file(_place(case, folder)) as file:
        if file.kind != "tensor":
            raise errors.FormatError(f"expected tensors, got a {file.kind}")
        fastrack.verify_file(file, keys=_keys(case))
        values = file.get(json.loads(case.get("tensor")))
        if values is None or values.scale is None:
            raise errors.FormatError("expected quantised values")
        wide = fastrack.to_device(values, keys=_keys(case), framework="torch", dtype="bfloat16")
        words = wide.reshape(-1).view(torch.int16).numpy()
        return {"shape": list(wide.shape), "sha256": sha256(words.astype("<i2")).hexdigest()}


def _folder(case, folder):
    fastrack.unseal_folder(_place(case, folder), folder / "plain", _keys(case))
    paths = [path for path in sorted((folder / "plain").rglob("*")) if path.is_file()]
    names = {path.relative_to(folder / "plain").as_posix(): path for path in paths}
    return {"files": {name: sha256(path.read_bytes()).hexdigest() for name, path in names.items()}}


def _data_set(case, folder):
    keys = fastrack.KeyRing(_keys(case))
    data = stored.read_data_set(_place(case, folder), keys)
    hashes = {name: sha256() for name in data.columns if name.removesuffix(blocks.VALID) == name}
    done = None
    for part in stored.read_parts(data.shards, keys):
        if part.blocks is done:
            continue
        done = part.blocks
        for name, digest in hashes.items():
            block, valid = part.blocks[name], part.blocks.get(name + blocks.VALID)
            for at in range(block.count):
                row = block.between(at, at + 1).tobytes()
                is_null = valid is not None and not valid.between(at, at + 1)[0]
                digest.update(NULL if is_null else len(row).to_bytes(8) + row)
    columns = {name: digest.hexdigest() for name, digest in hashes.items()}
    return {"samples": data.samples, "columns": columns, "complete": bool(data.is_complete)}


# Keys.


def _key_file(case, folder):
    key = fastrack.Key.load(_place(case, folder))
    return {"key": bytes(key.material()).hex(), "id": key.id}


def _of(classes, load):
    """Return what the first class reads that the content is of; both refuse what is damaged."""
    try:
        return load(classes[0])
    except errors.FormatError:
        return load(classes[1])


def _secret_file(case, folder):
    path = _place(case, folder)
    pair = _of((Signer, Identity), lambda kind: kind.load(path))
    public = pair.verifier if isinstance(pair, Signer) else pair.recipient
    text = base64.b64encode(public.public).decode()
    return {"algorithm": public.algorithm, "id": public.id, "public": text}


def _public_file(case, folder):
    path = _place(case, folder)
    public = _of((Verifier, Recipient), lambda kind: kind.load(path))
    return {"algorithm": public.algorithm, "id": public.id, "name": public.name}


class _Stand(KeyWrapper):
    """A token or a service: it has the wrapping key of a case, or answers what the case says."""

    from_uri = from_wrapped = _encrypt = None

    def __init__(self, provider, case):
        self.provider, self._case = provider, case

    def _decrypt(self, wrapped):
        if self._case.get("decrypted") is not None:
            return bytes.fromhex(self._case.get("decrypted"))
        key, ciphertext = base64.b64decode(self._case.get("wrapping")), wrapped.ciphertext
        try:
            if wrapped.algorithm == "AES-KW":
                return aes_key_unwrap(key, ciphertext)
            used = {"RSA-OAEP-SHA256": SHA256, "RSA-OAEP-SHA1": SHA1}[wrapped.algorithm]()
            return load_der_private_key(key, None).decrypt(ciphertext, OAEP(MGF1(used), used, None))
        except (InvalidUnwrap, ValueError):
            raise errors.AuthenticationError("the wrapping key does not open it") from None


def _wrapped(case, _):
    wrapped = WrappedKey.from_bytes(case.payload)
    provider = find(WRAPPERS[wrapped.provider])
    provider.from_wrapped(wrapped)  # which refuses parameters
    constants = provider._decrypt.__globals__  # as `_decrypt` asks for them, which needs a token or a service
    require_algorithm(wrapped, *(constants.get("_ALGORITHMS") or [constants["_ALGORITHM"]]))
    try:
        key = wrapped.unwrap(_Stand(wrapped.provider, case))
    except errors.ProviderError as error:  # which has another id or size than the file says
        raise errors.UnknownKeyError(str(error)) from None
    members = {"provider": wrapped.provider, "algorithm": wrapped.algorithm}
    return {"key": bytes(key.material()).hex(), "id": wrapped.key_id, **members}


def _grants(case, folder):
    grants = Grants.from_bytes(case.payload, owner=_owners(case))
    if case.get("passphrase") is None:
        ring = grants.unlock(_identity(case, folder), now=_time(case))
    else:
        ring = grants.unlock(passphrase=json.loads(case.get("passphrase")), now=_time(case))
    members = json.loads(base64.b64decode(json.loads(grants.envelope)["payload"]))
    named = {name: members[name] for name in ("files", "lineage", "least_version", "expires")}
    return {"key": bytes(ring.first.material()).hex(), **named}


def _identity(case, folder):
    path = folder / "identity"
    path.write_bytes(base64.b64decode(case.get("secret")))
    return Identity.load(path)


# Sets, and the documents of machines and tours.


def _manifest(case, folder):
    place, path = _place(case, folder), folder / "set.anchor"
    if case.get("anchor") is None:
        anchor = fastrack.Anchor.create(path, owner=_owners(case)[0])
    else:
        path.write_text(case.get("anchor") + "\n")
        anchor = fastrack.Anchor(path)
    names = anchor.names_in(place)  # once the manifest is accepted
    manifest = fastrack.load_manifest(place / "fastrack.manifest", owner=anchor.owner)
    for name in names:
        if not (place / name).exists():
            raise manifest.missing(place / name)
        manifest.check(name, place / name)
    anchor.advance()
    return {
        "version": anchor.version,
        "digest": anchor.digest,
        "files": len(names),
        "anchor": path.read_text().removesuffix("\n"),
        "log": manifest.log_entry.decode(),
    }


def _challenge(case, _):
    challenge = attest.Challenge.from_bytes(case.payload)
    expires = challenge.expires.replace(tzinfo=None).isoformat() + "Z"  # `strftime` does not pad years before 1000
    return {"id": challenge.id, "nonce": challenge.nonce.hex(), "expires": expires}


def _offer(case, _):
    challenge = attest.Challenge.from_bytes(base64.b64decode(case.get("challenge")))
    offer = attest.Offer.from_bytes(case.payload)
    try:
        attest.verify_offer(offer, challenge, attest.Policy(), now=_time(case))
    except errors.AttestationError as error:
        if error.evidence == "offer":
            raise
    except errors.FastrackError:
        pass  # evidence is opaque here
    binding, devices = attest.OfferBinding(challenge, offer.recipient), offer.evidence.devices
    return {
        "public": sha256(offer.recipient.public).hexdigest(),
        "cpu": json.loads(case.payload)["cpu"]["type"],
        "nonces": [binding.device_nonce(index).hex() for index in range(len(devices))],
        "report_data": binding.report_data(devices).hex(),
    }


def _answer(case, folder):
    identity = _identity(case, folder)
    evidence = attest.MachineEvidence(attest.TdxEvidence(b"quote"))
    pending = attest.PendingOffer(attest.Offer(case.get("challenge"), identity.recipient, evidence), identity)
    ring = pending.unlock(case.payload, owner=_owners(case), now=_time(case))
    return {"keys": [bytes(key.material()).hex() for key in ring]}


def _chain(case, _):
    chain = tour.Chain.from_bytes(case.payload, owner=_owners(case)[0])
    return {
        "visits": len(chain.visits),
        "head": chain.head,
        "model": [chain.model.number, chain.model.digest],
        "complete": chain.completion is not None,
    }


# Messages between ranks, and blocks.


def _session(case):
    randoms, members = map(bytes.fromhex, case.all("random")), map(int, case.all("member"))
    within = None
    if case.get("within") is not None:  # the secret for later groups, of a session that is not in the case
        within = GroupSession(bytes(32), [], [], "", "")
        within._secrets[-LATER_SIZE:] = bytes.fromhex(case.get("within"))
    key, name, run = bytes.fromhex(case.get("key")), case.get("group"), case.get("run")
    return GroupSession(key, list(randoms), list(members), name, run, within)


def _message(case, _):
    numbers = [int(case.get(name)) for name in ("number", "source", "target")]
    size = int(case.get("size"))
    if len(case.payload) != message_size(size):  # which a rank receives no more or less than
        raise errors.FormatError("expected a message of the size")
    key = _session(case).open(
        case.payload[:HEADER_SIZE], Route(case.get("operation"), *numbers, case.get("dtype"), size)
    )
    engine, plain = get_engine(), np.empty(size, np.uint8)
    if (
        engine.open_run(engine.expand_key(key), np.frombuffer(case.payload, np.uint8)[HEADER_SIZE:], plain, 0)
        is not None
    ):
        raise errors.AuthenticationError("a chunk")
    return {"sha256": sha256(plain).hexdigest()}


def _confirmation(case, _):
    if not hmac.compare_digest(case.payload, _session(case).mac(case.get("text").encode(), int(case.get("rank")))):
        raise errors.AuthenticationError("a MAC")
    return {}


def _block(case, _):
    members = json.loads(case.get("context"))
    try:
        "".join(members.values()).encode()  # which is what a server gives, as text
    except UnicodeEncodeError:
        raise errors.FormatError("expected Unicode text") from None
    context = BlockContext(**{**members, "hash": bytes.fromhex(members["hash"])})
    sealer = BlockSealer(_keys(case)[0])
    block = bytearray(int(case.get("size")))
    if len(case.payload) != sealer.sealed_size(len(block)):
        raise errors.FormatError("expected a message of the size")
    if not sealer.open(context, case.payload, block):
        raise errors.AuthenticationError("expected a block")
    return {"name": context.name(sealer.key), "sha256": sha256(block).hexdigest()}


READERS = {
    "sealed": _sealed,
    "widened": _widened,
    "key-file": _key_file,
    "secret-file": _secret_file,
    "public-file": _public_file,
    "wrapped": _wrapped,
    "grants": _grants,
    "manifest": _manifest,
    "folder": _folder,
    "data-set": _data_set,
    "challenge": _challenge,
    "offer": _offer,
    "answer": _answer,
    "chain": _chain,
    "message": _message,
    "confirmation": _confirmation,
    "block": _block,
}
