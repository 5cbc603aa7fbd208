import base64
import copy
import json
import pickle
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from helpers.cases import each
from hypothesis import given
from hypothesis import strategies as st

from fastrack._keys.signing import Signer, Verifier, open_envelope, read_unverified_payload, sign_envelope
from fastrack.errors import FormatError, KeyPermissionError, SignatureError

TYPE = "application/vnd.fastrack.test+json"
ALGORITHMS = {"Ed25519": 64, "ML-DSA-65": 3309}


@pytest.fixture(params=ALGORITHMS)
def signer(request):
    return Signer.generate(request.param, name="the owner")


def test_a_signed_document_is_opened_by_its_key_alone(signer):
    envelope = sign_envelope(b"payload", TYPE, [signer])
    for form in (bytes, bytearray, memoryview):
        assert open_envelope(form(envelope), TYPE, signer.verifier) == (b"payload", signer.verifier)
    others = [Signer.generate(algorithm).verifier for algorithm in ALGORITHMS]
    assert open_envelope(envelope, TYPE, [*others, signer.verifier])[1] == signer.verifier
    for trusted in (others, [], others[0]):
        with pytest.raises(SignatureError, match="got none that holds"):
            open_envelope(envelope, TYPE, trusted)
    with pytest.raises(FormatError, match="expected a document of type application/other"):
        open_envelope(envelope, "application/other", signer.verifier)


def test_base64_with_other_unused_bits_is_refused():
    signer = Signer.generate()
    envelope = sign_envelope(b"payload!", TYPE, [signer])  # the payload and the signature end in such bits
    for end in (b'=","payloadType', b'=="}]'):
        at = envelope.index(end) - 1
        altered = envelope[:at] + bytes([envelope[at] + 1]) + envelope[at + 1 :]
        with pytest.raises(FormatError):
            open_envelope(altered, TYPE, signer.verifier)


def test_the_envelope_is_that_of_dsse():
    """https://github.com/secure-systems-lab/dsse, protocol.md: PAE, and the test vector's type and payload."""
    signer = Signer.generate()
    envelope = json.loads(sign_envelope(b"hello world", "http://example.com/HelloWorld", [signer]))
    assert envelope["payload"] == "aGVsbG8gd29ybGQ="
    signed = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    public = Ed25519PublicKey.from_public_bytes(signer.verifier.public)
    public.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed)


def test_one_of_several_signatures_is_enough(signer):
    second = Signer.generate()
    envelope = sign_envelope(b"payload", TYPE, [second, signer])
    assert open_envelope(envelope, TYPE, signer.verifier)[1] == signer.verifier
    assert open_envelope(envelope, TYPE, second.verifier)[1] == second.verifier


def test_no_byte_of_payload_type_or_signature_may_change():
    signer = Signer.generate()
    envelope = json.loads(sign_envelope(b'{"a":1}', TYPE, [signer]))
    for member in ("payload", "sig"):
        holder = envelope["signatures"][0] if member == "sig" else envelope
        for index in range(len(base64.b64decode(holder[member]))):
            changed = copy.deepcopy(envelope)
            holder = changed["signatures"][0] if member == "sig" else changed
            content = bytearray(base64.b64decode(holder[member]))
            content[index] ^= 1
            holder[member] = base64.b64encode(content).decode()
            with pytest.raises(SignatureError):
                open_envelope(json.dumps(changed).encode(), TYPE, signer.verifier)
    changed = {**envelope, "payloadType": TYPE + "x"}
    with pytest.raises(SignatureError):
        open_envelope(json.dumps(changed).encode(), TYPE + "x", signer.verifier)


@given(
    st.binary(max_size=200)
    | st.builds(
        lambda value: json.dumps(value).encode(),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["payload", "payloadType", "signatures", "sig", "keyid"]), inner, max_size=5
                )
            ),
        ),
    )
)
def test_garbage_is_refused_as_such(content):
    verifier = VERIFIER
    with pytest.raises((FormatError, SignatureError)):
        open_envelope(content, TYPE, verifier)


VERIFIER = Signer.generate().verifier


@each("content", [b"", b"[" * 100_000, b"{}", b'{"payload":"","payloadType":1,"signatures":[]}'])
def test_what_is_no_envelope_has_no_payload(content):
    with pytest.raises(FormatError, match="not a signed document"):
        read_unverified_payload(content)


def test_a_payload_may_be_read_unverified(signer):
    assert read_unverified_payload(sign_envelope(b"payload", TYPE, [signer])) == b"payload"


@pytest.mark.parametrize(
    ("envelope", "payload"),
    [
        ('{"payload":"YWJj","payloadType":"t","signatures":[]}', b"abc"),
        ('{"payload":"YWJj", "signatures":[] , "payloadType":"t"}\n', b"abc"),
        ('{ "payload" : "YWJj", "payloadType": "t", "signatures": []}', b"abc"),
        ('{"payload":"YWJj" ,"payloadType":"t","signatures":[]}', b"abc"),
        ('{"payloadType":"t","signatures":[],"payload":"YWJj"}', b"abc"),
        ('{"payload":"\\/\\/\\/\\/","payloadType":"t","signatures":[]}', b"\xff\xff\xff"),
        ('{"payload":"YWJj","payload":"YWJk","payloadType":"t","signatures":[]}', None),
        ('{"payload":"YWJj","payloadType":"t","signatures":[],"payload":"YWJj"}', None),
        ('{"payload":"YWJj","payloadType":"t","signatures":[],"\\u0070ayload":"YWJk"}', None),
        ('{"payload":"YWJj\n","payloadType":"t","signatures":[]}', None),
        ('{"payload":"YW\\nJj","payloadType":"t","signatures":[]}', None),
        ('{"payload":"YWJé","payloadType":"t","signatures":[]}', None),
        ('{"payload":"YWJj","payloadType":"t","signatures":[]', None),
        ('{"payload":"YWJj","payloadType":"t","signatures":[],}', None),
        ('{"payload":"YWJj",}', None),
        ('{"payload":"YWJj",', None),
        ('{"payload":"YWJj', None),
        ('{"payload":"', None),
    ],
)
def test_the_payload_is_what_a_strict_parser_of_json_finds(envelope, payload):
    if payload is None:
        with pytest.raises(FormatError):
            read_unverified_payload(envelope.encode())
    else:
        assert read_unverified_payload(envelope.encode()) == payload
        assert base64.b64decode(json.loads(envelope)["payload"]) == payload


def test_keys_are_saved_and_loaded(signer, tmp_path):
    signer.save(tmp_path / "owner.signer")
    signer.verifier.save(tmp_path / "owner.pub")
    assert stat.S_IMODE((tmp_path / "owner.signer").stat().st_mode) == 0o600
    again = Signer.load(tmp_path / "owner.signer")
    assert again.verifier == signer.verifier
    assert Verifier.load(tmp_path / "owner.pub") == signer.verifier
    assert Verifier.load(tmp_path / "owner.pub").name == "the owner"
    again.verifier.verify(signer.sign(b"message"), b"message")
    with pytest.raises(FileExistsError):
        signer.save(tmp_path / "owner.signer")
    (tmp_path / "owner.signer").chmod(0o640)
    with pytest.raises(KeyPermissionError):
        Signer.load(tmp_path / "owner.signer")


def test_every_changed_byte_of_a_key_file_is_refused_or_changes_nothing(tmp_path):
    signer = Signer.generate(name="me")
    signer.save(tmp_path / "signer")
    signer.verifier.save(tmp_path / "public")
    for name, load in (("signer", lambda path: Signer.load(path).verifier), ("public", Verifier.load)):
        content = (tmp_path / name).read_bytes()
        for index in range(len(content)):
            changed = bytearray(content)
            changed[index] ^= 1
            (tmp_path / name).write_bytes(changed)
            try:
                loaded = load(tmp_path / name)
            except FormatError:
                continue
            assert loaded != signer.verifier or loaded.name != "me", "a change was not noticed"
            assert name == "public", "a secret file has the id of its key"


def test_the_wrong_file_is_told(signer, tmp_path):
    signer.save(tmp_path / "signer")
    signer.verifier.save(tmp_path / "public")
    with pytest.raises(FormatError, match="of which the public file is wanted"):
        Verifier.load(tmp_path / "signer")
    (tmp_path / "public").chmod(0o600)
    with pytest.raises(FormatError, match="not a fastrack secret key file"):
        Signer.load(tmp_path / "public")


@each("name", ["a\nb", "x" * 65, " a", "ä"])
def test_a_name_is_printable_and_short(name):
    with pytest.raises(ValueError, match="64 characters"):
        str(Signer.generate(name=name).verifier)


def test_secrets_stay_where_they_are(signer):
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            take(signer)
    assert signer.verifier.id in repr(signer)


SMALL_ORDER = (  # the points of order 1, 2, 4 and 8, without the sign of x; the last two name the first two again
    "0100000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
)


def test_a_public_key_of_small_order_is_refused_in_every_encoding(tmp_path):
    identity = bytes.fromhex(SMALL_ORDER[0])
    Ed25519PublicKey.from_public_bytes(identity).verify(identity + bytes(32), b"any document")  # why it is refused
    for text in SMALL_ORDER:
        low = bytes.fromhex(text)
        for public in (low, low[:31] + bytes([low[31] | 0x80])):  # the sign of x
            line = f"fastrack-public-1:Ed25519:{base64.b64encode(public).decode()}"
            (tmp_path / "owner.pub").write_text(f"{line}\n")
            for make in (
                lambda public=public: Verifier("Ed25519", public),
                lambda line=line: Verifier.parse(line),
                lambda: Verifier.load(tmp_path / "owner.pub"),
            ):
                with pytest.raises(FormatError, match="small order"):
                    make()


def test_a_public_key_of_ml_dsa_whose_t1_is_zero_is_refused():
    for seed in (bytes(32), bytes(range(32))):
        with pytest.raises(FormatError, match="t1 is zero"):
            Verifier("ML-DSA-65", seed + bytes(1920))
        Verifier("ML-DSA-65", seed + bytes(1919) + b"\1")


def test_other_public_keys_next_to_those_of_small_order_are_keys():
    for public in (bytes([9]) + bytes(31), bytes([0xEB]) + b"\xff" * 30 + b"\x7f", Signer.generate().verifier.public):
        assert Verifier("Ed25519", public).public == public


def test_an_unknown_algorithm_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected an algorithm of Ed25519, ML-DSA-65"):
        Signer.generate("RSA")
    with pytest.raises(FormatError, match="got 'RSA'"):
        Verifier("RSA", b"0" * 32)
    with pytest.raises(FormatError, match="got 31 bytes"):
        Verifier("Ed25519", b"0" * 31)
    (tmp_path / "x").write_bytes(b"# fastrack secret key, RSA, id " + b"0" * 32 + b"\nfastrack-secret-1:RSA:00\n")
    (tmp_path / "x").chmod(0o600)
    with pytest.raises(FormatError, match="got one of RSA"):
        Signer.load(tmp_path / "x")
