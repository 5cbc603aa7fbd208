"""Manifests: what they list, what of it is compared, and what is no manifest."""

import base64
import json
import os
import pickle
from functools import partial

import numpy as np
import pytest
from helpers import file_ids
from helpers.cases import each
from helpers.sealed_files import write_file
from helpers.signed import sign
from hypothesis import given
from hypothesis import strategies as st

import fastrack
from fastrack import AuthenticationError, FormatError, Key, Manifest, RollbackError, SignatureError, load_manifest
from fastrack._sets import entries
from fastrack._sets import manifest as manifests
from fastrack.grants import Signer

KEY = Key.from_bytes(bytes(range(32)))
OWNER = Signer.generate(name="owner")
NAME, CONFIG = "data.safetensors", "config.json"


def save(folder, value=1, **options):
    tensors = {"x": np.full((3, 2), value), "naïve 名\n": np.array(0.5), "open": np.arange(4) + value}
    fastrack.save_file(tensors, folder / NAME, KEY, plain=["open"], **options)


@pytest.fixture
def folder(tmp_path):
    """A published set of two files."""
    save(tmp_path, metadata={"note": "a"})
    (tmp_path / CONFIG).write_text('{"layers": 2}')
    fastrack.publish(tmp_path, signer=OWNER)
    return tmp_path


@pytest.fixture
def manifest(folder):
    return load_manifest(folder / "fastrack.manifest", owner=OWNER.verifier)


def payload_of(envelope):
    return json.loads(base64.b64decode(json.loads(envelope)["payload"]))


def text_of(members):
    return json.dumps(members, sort_keys=True, separators=(",", ":")).encode()


def signed(payload, signer=OWNER, kind=manifests.PAYLOAD_TYPE):
    return sign(payload, kind, signer)


def parse(envelope, owner=OWNER):
    return Manifest.from_bytes(envelope, owner=owner.verifier)


# What a manifest lists


def test_a_manifest_lists_headers_and_hashes(folder, manifest):
    assert (manifest.version, manifest.history) == (1, ())
    assert list(manifest.files) == [CONFIG, NAME]
    members = payload_of((folder / "fastrack.manifest").read_bytes())["files"]
    assert members[CONFIG]["size"] == 13
    with fastrack.load_file(folder / NAME) as file:
        entry = members[NAME]
        assert (entry["file"], entry["key"], entry["kind"]) == (file.file_id, KEY.id, "tensor")
        for name, tensor in file.items():
            header = base64.b64encode(bytes(tensor.message[:56])).decode()
            assert entry["sealed"][name] == [tensor.dtype, list(tensor.shape), header]
    assert list(entry["plain"]) == ["open"]
    assert entry["origins"] == entry["digests"] == {}


@pytest.mark.parametrize("algorithm", ["Ed25519", "ML-DSA-65"])
def test_either_kind_of_signature_holds(folder, algorithm):
    owner = Signer.generate(algorithm)
    fastrack.publish(folder, signer=owner, manifest=folder / "other.manifest")
    load_manifest(folder / "other.manifest", owner=owner.verifier).verify(folder)
    with pytest.raises(SignatureError, match=OWNER.verifier.id):
        load_manifest(folder / "other.manifest", owner=OWNER.verifier)


def test_one_of_several_owners_suffices(folder):
    other = Signer.generate().verifier
    load_manifest(folder / "fastrack.manifest", owner=[other, OWNER.verifier])
    with pytest.raises(SignatureError):
        load_manifest(folder / "fastrack.manifest", owner=[other])


def test_a_message_that_was_sealed_for_another_file_keeps_its_origin(tmp_path):
    sealed = fastrack.seal(np.arange(5), KEY, name="x")
    fastrack.save_file({"x": sealed, "y": np.arange(2)}, tmp_path / NAME, KEY)
    manifest = fastrack.publish(tmp_path / NAME, signer=OWNER)
    assert manifest.files[NAME].origins == {"x": sealed.context.file}
    manifest.check(NAME, tmp_path / NAME)
    fastrack.save_file({"x": fastrack.seal(np.arange(5), KEY, name="x"), "y": np.arange(2)}, tmp_path / NAME, KEY)
    with pytest.raises(RollbackError, match="file id"):
        manifest.check(NAME, tmp_path / NAME)


def test_checkpoints_are_listed_as_such(tmp_path):
    fastrack.save_checkpoint(tmp_path / NAME, {"step": 1}, key=KEY)
    manifest = fastrack.publish(tmp_path / NAME, signer=OWNER)
    assert manifest.files[NAME].kind == "checkpoint"
    manifest.check(NAME, tmp_path / NAME)


def test_entries_are_pickled_by_one_name(manifest):
    entry = pickle.loads(pickle.dumps(manifest.files[NAME]))
    assert entry == manifest.files[NAME]
    assert entry.manifest == manifest.files[NAME].manifest


def test_the_log_entry_has_lineage_version_and_digest(manifest):
    expected = f"fastrack/manifest@1\n{manifest.lineage}\n1\n{manifest.digest}\n"
    assert manifest.log_entry == expected.encode()


# What is compared


def test_a_folder_that_was_published_is_found_to_be_the_same(folder, manifest):
    manifest.verify(folder)
    (folder / ".hidden").write_text("")
    (folder / "data.safetensors.grants").write_text("")
    manifest.verify(folder)


def test_a_file_more_and_a_file_less_are_refused(folder, manifest):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(RollbackError, match=r"'tokenizer\.json', which is none") as caught:
        manifest.verify(folder)
    assert caught.value.path == folder / "tokenizer.json"
    (folder / "tokenizer.json").rename(folder / CONFIG)
    with pytest.raises(AuthenticationError, match=r"config\.json: expected 13 bytes"):
        manifest.verify(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(RollbackError, match=r"config\.json: expected this file"):
        manifest.verify(folder)


def resealed(folder):
    """Seal other content under the same file id, as a holder of the key can."""
    with fastrack.load_file(folder / NAME) as file:
        file_id = file.file_id
    with pytest.MonkeyPatch.context() as patch:
        file_ids.fix(patch, file_id)
        save(folder, 2, metadata={"note": "a"})


def test_another_message_under_the_same_context_is_refused_and_named(folder, manifest):
    resealed(folder)
    with pytest.raises(RollbackError, match="the message whose salt") as caught:
        manifest.check(NAME, folder / NAME)
    assert caught.value.tensor in {"x", "naïve 名\n"}
    assert caught.value.path == folder / NAME


@each(
    ("options", "told"),
    [
        ({"plain": []}, "'open': expected it to be stored unencrypted by .*, got a sealed one"),
        ({"plain": ["open", "x"]}, "'x': expected it to be sealed by .*, got an unencrypted one"),
        ({"drop": "x"}, "'x': expected it to be sealed by .*, got none"),
        ({"drop": "open"}, "'open': expected it to be stored unencrypted by .*, got none"),
        ({"more": "z"}, "'z': expected no such tensor"),
        ({"metadata": {"note": "b"}}, "expected metadata"),
        ({"dtype": np.float32}, "expected F64"),
        ({"shape": (4, 2)}, r"expected I64 \[2, 4\]"),
        ({"kind": "checkpoint"}, "expected a tensor file"),
        ({"key": Key.from_bytes(bytes(range(16)))}, f"under key {KEY.id}"),
    ],
)
def test_each_change_of_a_file_is_told(tmp_path, monkeypatch, options, told):
    monkeypatch.setattr(os, "urandom", bytes)  # file id and salts stay the same

    def write(options):
        tensors = {"x": np.zeros(options.get("shape", (2, 4)), np.int64), "y": np.ones(3, options.get("dtype", "f8"))}
        tensors |= {"open": np.arange(3), options.get("more", "x"): np.zeros(options.get("shape", (2, 4)), np.int64)}
        tensors.pop(options.get("drop"), None)
        plain = frozenset(options.get("plain", ["open"])) & tensors.keys()
        metadata, kind = options.get("metadata", {"note": "a"}), options.get("kind", "tensor")
        write_file(tensors, tmp_path / NAME, options.get("key", KEY), plain=plain, metadata=metadata, kind=kind)

    write({})
    manifest = fastrack.publish(tmp_path / NAME, signer=OWNER)
    write({})
    manifest.check(NAME, tmp_path / NAME)
    write(options)
    with pytest.raises(AuthenticationError, match=told) as raised:
        manifest.check(NAME, tmp_path / NAME)
    assert isinstance(raised.value, RollbackError) == ("metadata" not in options)  # whose digest tells of a change


def alter(path, content):
    """Flip a bit of the first byte of some content of a file."""
    data = bytearray(path.read_bytes())
    data[data.index(content)] ^= 1
    path.write_bytes(data)


def test_a_plain_tensor_is_authenticated_when_it_is_read(folder, manifest):
    alter(folder / NAME, np.arange(4, dtype=np.int64).tobytes()[8:])
    with pytest.raises(AuthenticationError, match="'open'") as caught:
        manifest.check(NAME, folder / NAME)
    assert caught.value.tensor == "open"


@pytest.mark.parametrize("digests", [False, True])
def test_chunks_are_listed_on_request_only(folder, digests):
    """A holder of the key can make other chunks under the same header; without the key they do not open."""
    manifest = fastrack.publish(folder, signer=OWNER, digests=digests)
    with fastrack.load_file(folder / NAME) as file:
        message = bytes(file["x"].message)
    alter(folder / NAME, message[56:])
    if not digests:
        manifest.verify(folder)
        return
    with pytest.raises(AuthenticationError, match="'x': its bytes do not have the SHA-256") as caught:
        manifest.verify(folder)
    assert caught.value.tensor == "x"


# What is no manifest


def changed(manifest, change):
    members = payload_of(manifest.envelope)
    change(members)
    return signed(text_of(members))


def test_every_flipped_byte_is_refused(manifest):
    for place in range(0, len(manifest.envelope), 7):
        data = bytearray(manifest.envelope)
        data[place] ^= 1
        with pytest.raises((SignatureError, FormatError)):
            parse(bytes(data))
    assert parse(manifest.envelope) == manifest


def test_every_truncation_is_refused(manifest):
    for size in range(0, len(manifest.envelope), 11):
        with pytest.raises(FormatError):
            parse(manifest.envelope[:size])


@each(
    "change",
    [
        lambda envelope: envelope + b"\n",
        lambda envelope: envelope[:-1],
        lambda envelope: b" " + envelope,
        lambda envelope: envelope.replace(b'":"', b'": "', 1),
        lambda envelope: b'{"payload":"",' + envelope[1:],
        lambda envelope: envelope.replace(b'"payloadType"', b'"a":1,"payloadType"'),
        lambda envelope: envelope.replace(b'{"payload":"e', b'{"payload":"\\u0065'),
        lambda envelope: envelope.replace(b'"keyid":"', b'"keyid":"0'),
    ],
)
def test_an_envelope_has_one_form(manifest, change):
    other = change(manifest.envelope)
    assert other != manifest.envelope
    with pytest.raises(FormatError):
        parse(other)


def test_base64_has_one_form():
    for size in range(3):  # the length of the payload, to have each number of unused bits
        payload = b" " * (30 + size)
        envelope = signed(payload)
        encoded = base64.b64encode(payload)
        for last in b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/":
            place = len(encoded.rstrip(b"=")) - 1
            other = encoded[:place] + bytes([last]) + encoded[place + 1 :]
            if other != encoded and base64.b64decode(other) == payload:
                with pytest.raises(FormatError, match=r"expected a (signed manifest|DSSE envelope)"):
                    parse(envelope.replace(encoded, other))


def test_a_document_of_another_type_is_refused(manifest):
    payload = base64.b64decode(json.loads(manifest.envelope)["payload"])
    with pytest.raises(FormatError, match="type"):
        parse(signed(payload, kind="application/vnd.fastrack.grants.v1+json"))


HEADER = base64.b64encode(bytes(56)).decode()


FILE, TENSORS = ("files", NAME), ("files", NAME, "sealed")
UNSOUND = [  # where, the member's name, and its values
    ((), "format", 2, True),
    ((), "more", 1),
    ((), "issued", "2026-1-1T00:00:00Z"),
    ((), "lineage", "0" * 31, None),
    ((), "version", 0, 2, 2**53, 1.0),
    ((), "history", ["0" * 64]),
    ((), "files", []),
    (("files",), "a", [], {}),
    (("files", CONFIG), "size", -1, True),
    (("files", CONFIG), "sha256", "0" * 63 + "A"),
    (("files", CONFIG), "more", 1),
    (FILE, "kind", "other", []),
    (FILE, "file", None),
    (FILE, "key", "A" * 32),
    (FILE, "metadata", 1),
    (FILE, "sealed", []),
    (FILE, "digests", {"x": "0" * 64}, {"x": "0", "naïve 名\n": "0"}),
    (FILE, "origins", {"open": "0" * 32}, {"x": "0"}),
    (TENSORS, "open", ["F32", [], HEADER]),
    (TENSORS, "\ud800", ["F32", [], HEADER]),
    (TENSORS, "x", ["F32", [], HEADER, 1], ["F32", []], "abc", {"a": 1, "b": 2, "c": 3}),
    (TENSORS, "x", *([dtype, [], HEADER] for dtype in ("f32", 1, []))),
    (TENSORS, "x", *(["F32", shape, HEADER] for shape in ([-1], [1.0], [True], [2**53], [[]], {}, None))),
    (TENSORS, "x", *(["F32", [], header] for header in (HEADER[:-4], HEADER[:-2] + "B=", "A" * 76, 1))),
    ((*FILE, "plain"), "open", ["F32", [], "0" * 63 + "g"], ["F32", [], None]),
]
NO_NAMES = ["", "/a", "../a", "a/../b", "a//b", "a/", "./a", ".", "..", "a\\b", "a\nb", "\0", "a" * 1025, "\ud800"]


def put(members, place, name, value):
    for part in place:
        members = members[part]
    members[name] = value


@each(
    "change",
    [
        *(partial(put, place=place, name=name, value=value) for place, name, *values in UNSOUND for value in values),
        *(lambda m, name=name: m["files"].update({name: m["files"][CONFIG]}) for name in NO_NAMES),
        lambda m: m.pop("issued"),
        lambda m: m.update(version=2, history=["0" * 63]),
        lambda m: m.update(version=2, history="0"),
        lambda m: m["files"][NAME].update(origins={"x": m["files"][NAME]["file"]}),
    ],
)
def test_values_out_of_range_are_refused(manifest, change):
    with pytest.raises(FormatError, match="is not a manifest"):
        parse(changed(manifest, change))


@each(
    "change",
    [
        lambda text: text.replace(b'{"digests"', b'{"a":1,"digests"'),
        lambda text: text.replace(b'"format":1', b'"format":1,"format":1'),
        lambda text: text.replace(b'"format":1,', b"").replace(b'{"files"', b'{"format":1,"files"'),
        lambda text: text.replace(b'"format":1', b'"format":1.0'),
        lambda text: text.replace(b'"format":1', b'"format":' + b"1" * 5000),
        lambda text: text.replace(b'"format":1', b'"format":1e9'),
        lambda text: text.replace(b'"format":1', b'"format":NaN'),
        lambda text: text.replace(b'"format":1', b'"format":' + b"[" * 100_000),
        lambda text: text.replace(b"config", b"\\u0063onfig"),
        lambda text: text.replace(b"\\u00ef", "ï".encode()),
        lambda text: text.replace(b"\\u00ef", b"\\u00EF"),
        lambda text: text + b" ",
        lambda text: text + b"{}",
        lambda text: text[:-1],
        lambda text: b"[]",
        lambda text: b"null",
        lambda text: b"",
        lambda text: b"\xff",
    ],
)
def test_the_payload_has_one_form(manifest, change):
    payload = base64.b64decode(json.loads(manifest.envelope)["payload"])
    assert change(payload) != payload
    with pytest.raises(FormatError, match="is not a manifest"):
        parse(signed(change(payload)))


@given(data=st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(FormatError):
        parse(data)
    with pytest.raises(FormatError):
        parse(signed(data))


def test_a_manifest_beyond_the_bound_is_neither_read_nor_written(limited, manifest, folder):
    limited(manifest_size=len(manifest.envelope) - 1)
    with pytest.raises(FormatError, match="at most"):
        load_manifest(folder / "fastrack.manifest", owner=OWNER.verifier)
    with pytest.raises(FormatError, match="at most"):
        manifests.sign_manifest(manifest.files, OWNER)


def test_a_thousand_tensors_are_read_back():
    listed = {f"layers.{number}.weight": ["BF16", [4096, number], HEADER] for number in range(1000)}
    entry = entries.SealedEntry("0" * 32, "1" * 32, "tensor", "2" * 64, listed, {}, {}, {})
    assert parse(manifests.sign_manifest({NAME: entry}, OWNER)).files == {NAME: entry}
