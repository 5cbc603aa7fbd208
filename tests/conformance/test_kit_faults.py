"""The test kit tells of faults: of a check that is left out, or a member that a context lacks, each in one rule."""

from dataclasses import replace
from datetime import UTC, datetime
from unittest.mock import ANY  # equal to everything

import package_reader
import pytest
from fastrack_testkit import cases

from fastrack import Key
from fastrack._crypto import derivation
from fastrack._documents import canonical as documents
from fastrack._documents import strict
from fastrack._keys import grants, key_files, signing, wrapped
from fastrack._samples import stored
from fastrack._sealed import contexts, file_header, messages, metadata, scales
from fastrack._sets import anchor, entries, folder_writer, manifest
from fastrack.attest import _exchange, _offer, _verify_offer
from fastrack.distributed import _session
from fastrack.errors import AuthenticationError
from fastrack.kv import _sealer
from fastrack.tour import _chain

LONG_AGO = datetime(1999, 1, 1, tzinfo=UTC)


class Number(int):
    """A number that no comparison tells from another."""

    __hash__ = int.__hash__

    def __eq__(self, _):
        return True


def nothing(*_, **__):
    return None


def into(value):
    """Return a fault that puts a value in the place of a function or constant."""
    return lambda _: value


def result(change):
    """Return a fault by which a function returns what `change` makes of its result."""
    return lambda right: lambda *args, **named: change(right(*args, **named))


def given(change):
    """Return a fault by which a function or method gets what `change` makes of its first argument."""
    return lambda right: lambda first, *args, **named: right(change(first), *args, **named)


def swallow(right):
    def method(*args, **named):
        try:
            return right(*args, **named)
        except AuthenticationError:
            return None

    return method


def at_another_time(right):
    return lambda *args, **named: right(*args, **{**named, "now": LONG_AGO})


def long_before(right):
    return lambda offer, challenge, _, *args: right(offer, challenge, LONG_AGO, *args)


def of_its_own_type(right):
    return lambda envelope, _, *args: right(envelope, signing._parse_envelope(envelope, ANY)[2], *args)


def of_rank_0(right):
    return lambda session, text, _: right(session, text, 0)


def from_0_on(state):
    return state if state.digest else replace(state, version=0)


def names_in_both(header, _, file, path):
    return [name for name in folder_writer.names_before(header, path) if name in file]


def told(**members):
    """Return a fault by which shards say these things of themselves."""
    return result(lambda about: about and replace(about, **members))


def without(name):
    return result(lambda members: {each: value for each, value in members.items() if each != name})


# The rule that a fault breaks, what it is, and where: an object, the name in it, and what becomes of the function.
FAULTS = [
    ("sealed.commitment", "commitments are not compared", derivation, "derive_rows", result(nothing)),
    ("sealed.tag", "a chunk with a wrong tag is zeros, and no error", messages.OpenMessage, "read", swallow),
    ("sealed.entry.members", "entries may have more members", metadata, "_MEMBERS", into(ANY)),
    ("sealed.entries.duplicate", "members may be there twice", strict, "unique", into(dict)),
    ("sealed.purpose", "contexts do not have the kind", contexts, "_around_name", given(lambda _: "tensor")),
    ("sealed.binding", "bindings are not compared", contexts.Binding, "check", into(nothing)),
    ("sealed.guard", "any entry of its name is the guard", file_header, "_SORTED_GUARD", into(ANY)),
    ("sealed.version", "versions are not compared", metadata, "FORMAT_VERSION", into(ANY)),
    ("sealed.scale.block", "scales are not counted", scales.Scale, "check", into(nothing)),
    ("sealed.scale", "contexts do not have the scale", scales.Scale, "encode", into(lambda *_: "{}")),
    ("secret-file.id", "ids of key pairs are not compared", key_files, "public_id", into(lambda *_: ANY)),
    ("wrapped.key", "another key may be opened", wrapped.KeyWrapper, "unwrap", into(lambda w, k: Key(w._decrypt(k)))),
    ("wrapped.form", "JSON may have another form", documents, "encode", into(lambda *_, **__: ANY)),
    ("grants.expires", "grants do not end", grants.Grants, "unlock", at_another_time),
    ("grants.constraints", "the end is not bound", grants, "_constraints", without("expires")),
    ("grants.signature", "signatures are not verified", signing.Verifier, "verify", into(nothing)),
    ("grants.type", "types are not compared", signing, "_verify_envelope", of_its_own_type),
    ("grants.payload", "JSON may have another form", documents, "encode", into(lambda *_, **__: ANY)),
    ("manifest.follows", "history is not looked at", anchor._State, "require_before", into(nothing)),
    ("manifest.least", "a new anchor has no least version", anchor._State, "require_before", given(from_0_on)),
    ("manifest.file.plain", "unencrypted bytes are not hashed", entries.SealedEntry, "check_plain", into(nothing)),
    ("manifest.file.bytes", "files are not hashed", entries.PlainEntry, "check", into(nothing)),
    ("manifest.file.header", "headers of messages are not compared", entries, "encode_bytes", into(lambda _: ANY)),
    ("manifest.file.metadata", "metadata is not hashed", entries, "_digest_of_metadata", into(lambda _: ANY)),
    (
        "manifest.file.digests",
        "messages are not hashed",
        entries.SealedEntry,
        "_check_sealed",
        given(lambda e: replace(e, digests={})),
    ),
    ("manifest.names", "names may lead anywhere", manifest, "is_name", into(lambda _: True)),
    ("folder.header", "a header need not fit the file", folder_writer, "_require_layout", into(names_in_both)),
    ("folder.file.expected", "files are not as listed", entries.SealedEntry, "check", into(nothing)),
    ("data-set.previous", "any shard may be before", stored, "read_about", told(previous=ANY)),
    ("data-set.data-set", "shards may be of another dataset", stored, "read_about", told(data_set=ANY)),
    (
        "data-set.first",
        "shards may be in another place",
        stored,
        "read_about",
        result(lambda about: about and replace(about, first=Number(about.first))),
    ),
    ("offer.devices", "devices have no limit", _offer, "DEVICES_LIMIT", into(1 << 30)),
    (
        "offer.challenge",
        "challenges are not compared",
        _verify_offer,
        "open_offer",
        result(lambda o: replace(o, challenge_id=ANY)),
    ),
    ("offer.time", "challenges do not end", _verify_offer, "prove_offer", long_before),
    (
        "answer.challenge",
        "any challenge is answered",
        _exchange,
        "read_envelopes",
        result(lambda found: (ANY, found[1])),
    ),
    ("chain.delegated", "any order is right", _chain.Chain, "require_turn", into(nothing)),
    ("chain.files", "visits need not keep to the plan", _chain, "_check_visit", into(nothing)),
    ("message.context", "operations have no number", _session.Route, "context", given(lambda r: replace(r, number=0))),
    ("confirmation.text", "MACs have no rank", _session.GroupSession, "mac", of_rank_0),
    ("block.context", "blocks have no tenant", _sealer.BlockContext, "_members", given(lambda b: b._replace(salt=""))),
]


def cases_of(rule):
    """Return the cases of a rule; of a kind, the first half of a rule, all."""
    return [case for case in cases(rule.partition(".")[0]) if rule in {case.rule, case.kind}]


def tells(case):
    return package_reader.read(case) != (case.result, case.expect)


@pytest.mark.parametrize(("rule", "fault", "place", "name", "change"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_a_fault_disagrees_with_a_case_of_its_rule(monkeypatch, rule, fault, place, name, change):
    monkeypatch.setattr(place, name, change(getattr(place, name)))
    assert any(map(tells, cases_of(rule))), fault
