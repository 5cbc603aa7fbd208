"""Proofs of inclusion, against another implementation and what is published."""

import base64
from random import Random

import pytest
from helpers.cases import each
from helpers.tlog_writer import NoteSigner, checkpoint, path, proof, tree_hash
from hypothesis import given
from hypothesis import strategies as st

from fastrack import FormatError, SignatureError, TransparencyLog
from fastrack._crypto import tlog

ENTRIES = [b"entry %d\n" % number for number in range(11)]
LOG = NoteSigner("example.com/log", 1)
WITNESSES = [NoteSigner("witness.example/w1", 4, 1), NoteSigner("witness.example/w2", 6, 2)]
TRUSTED = TransparencyLog(LOG.verifier, [witness.verifier for witness in WITNESSES])
ALL = [LOG, *WITNESSES]
GOOD = proof(6, ENTRIES, ALL)


def verify(data, entry=ENTRIES[6], log=TRUSTED):
    return log.verify(data, entry)


# The tree


# RFC 6962 defines the hashes; these entries and roots are those of Certificate Transparency's own tests.
LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def test_published_roots_are_reached_from_each_leaf():
    entries = [bytes.fromhex(leaf) for leaf in LEAVES]
    for size, root in enumerate(ROOTS, 1):
        assert tree_hash(entries[:size]).hex() == root
        for index in range(size):
            assert tlog.root_of(entries[index], index, size, path(index, entries[:size])).hex() == root


def test_every_leaf_of_every_tree_is_proved_and_nothing_else():
    for size in range(1, 20):
        entries = [bytes([number]) for number in range(size)]
        root = tree_hash(entries)
        for index in range(size):
            hashes = path(index, entries)
            for claim in range(size + 2):
                case = (size, index, claim)
                assert (tlog.root_of(entries[index], claim, size, hashes) == root) == (claim == index), case
            assert tlog.root_of(b"other", index, size, hashes) != root
            assert tlog.root_of(entries[index], index, size, [*hashes, bytes(32)]) != root
            assert not hashes or tlog.root_of(entries[index], index, size, hashes[:-1]) != root
            assert not hashes or tlog.root_of(entries[index], index, size, hashes[1:]) != root


# The signatures


def test_a_published_note_key_verifies_its_signature():
    """The example of golang.org/x/mod/sumdb/note."""
    key = tlog._NoteKey.parse("PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW")
    note = (
        "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n\n"
        "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
    )
    text, signatures = tlog._parse_note(note)
    assert key.has_signed(text, signatures, "", 0, b"", "the note")
    with pytest.raises(SignatureError):
        key.has_signed(text.replace("answer", "reason"), signatures, "", 0, b"", "the note")


def test_a_proof_holds():
    found = verify(GOOD)
    assert (found.origin, found.index, found.size, found.root) == (LOG.name, 6, 11, tree_hash(ENTRIES))
    assert found.witnesses == tuple(witness.name for witness in WITNESSES)
    assert verify(proof(0, ENTRIES[:1], ALL), ENTRIES[0]).size == 1
    assert verify(proof(6, ENTRIES, ALL, extra=b"anything", extension="an extension\n")).index == 6


@each("kind", [1, 4, 6])
def test_a_log_signs_by_any_of_the_kinds(kind):
    log = NoteSigner("example.com/log", kind)
    assert verify(proof(6, ENTRIES, [log]), log=TransparencyLog(log.verifier)).witnesses == ()


def test_signatures_of_unknown_keys_are_ignored():
    others = [NoteSigner("example.com/log", 1, 9), NoteSigner("other.example", 1, 9)]
    assert verify(proof(6, ENTRIES, [*ALL, *others], origin=LOG.name)).index == 6
    with pytest.raises(SignatureError, match=r"expected a signature by the log example\.com/log"):
        verify(proof(6, ENTRIES, [*others, *WITNESSES], origin=LOG.name))


def test_a_quorum_is_counted():
    verifiers = [witness.verifier for witness in WITNESSES]
    one = proof(6, ENTRIES, [LOG, WITNESSES[1]])
    assert verify(one, log=TransparencyLog(LOG.verifier, verifiers, quorum=1)).witnesses == (WITNESSES[1].name,)
    with pytest.raises(SignatureError, match="by 2 of the witnesses, got 1"):
        verify(one)
    with pytest.raises(SignatureError, match="got 1"):
        verify(proof(6, ENTRIES, [LOG, WITNESSES[1], WITNESSES[1]]))


def test_another_log_another_entry_and_another_tree_are_refused():
    other = NoteSigner("example.com/other", 1)
    with pytest.raises(SignatureError, match=r"example\.com/log, got one of 'example\.com/other'"):
        verify(proof(6, ENTRIES, [LOG, other, *WITNESSES], origin="example.com/other"))
    with pytest.raises(SignatureError, match="a proof of another entry"):
        verify(GOOD, ENTRIES[5])
    with pytest.raises(SignatureError, match="a proof of another entry"):
        verify(GOOD.replace(b"index 6", b"index 11"))


@each("kind", [1, 4, 6])
def test_every_flipped_bit_of_a_signature_is_refused(kind):
    log = NoteSigner("example.com/log", kind)
    trusted = TransparencyLog(log.verifier)
    head, _, line = proof(6, ENTRIES, [log]).decode().rpartition(" ")
    signature = base64.b64decode(line)
    places = range(4, len(signature)) if kind != 6 else range(4, len(signature), 37)
    for place in places:
        other = bytearray(signature)
        other[place] ^= 1 << place % 8
        data = f"{head} {base64.b64encode(other).decode()}\n".encode()
        with pytest.raises(SignatureError, match="does not hold"):
            verify(data, log=trusted)
    for size in (4, 5, 12, len(signature) - 1):
        data = f"{head} {base64.b64encode(signature[:size]).decode()}\n".encode()
        with pytest.raises(SignatureError, match="does not hold"):
            verify(data, log=trusted)


def test_a_key_of_a_log_is_no_key_of_a_witness():
    """The same Ed25519 key has another id for another type."""
    as_witness = NoteSigner(LOG.name, 4)
    with pytest.raises(SignatureError, match="expected a signature by the log"):
        verify(proof(6, ENTRIES, [as_witness]), log=TransparencyLog(LOG.verifier))
    with pytest.raises(FormatError, match="type 4 or 6"):
        TransparencyLog(LOG.verifier, [NoteSigner("w", 1).verifier])


def test_settings_that_cannot_be_met_are_refused():
    witness = WITNESSES[0].verifier
    with pytest.raises(ValueError, match="got one twice"):
        TransparencyLog(LOG.verifier, [witness, NoteSigner("another", 4, 1).verifier])
    for quorum in (-1, 2):
        with pytest.raises(ValueError, match="quorum="):
            TransparencyLog(LOG.verifier, [witness], quorum=quorum)


@each(
    "text",
    [
        "",
        "a",
        "a+b",
        LOG.verifier + " ",
        LOG.verifier.replace("example", "exam ple"),
        LOG.verifier.replace("example", "exam\u2003ple"),
        LOG.verifier.replace("example", "sample"),
        "+00000000+" + LOG.verifier.rpartition("+")[2],
        LOG.verifier[:-1],
        LOG.verifier[:-4],
        "a+00000000+",
        "a+00000000+AA==",
        "a+00000000+Ag==",
    ],
)
def test_a_malformed_verifier_key_is_refused(text):
    with pytest.raises(FormatError):
        TransparencyLog(text)


# The text


@each(
    "change",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: b"\n" + data,
        lambda data: data.replace(b"@v1", b"@v2"),
        lambda data: data.replace(b"index 6", b"index 06"),
        lambda data: data.replace(b"index 6", b"index -6"),
        lambda data: data.replace(b"index 6", b"index +6"),
        lambda data: data.replace(b"index 6", b"index " + b"9" * 19),
        lambda data: data.replace(b"index 6", b"index " + b"9" * 5000),
        lambda data: data.replace(b"index 6", "index ٦".encode()),
        lambda data: data.replace(b"index 6\n", b"index 6\r\n"),
        lambda data: data.replace(b"index 6\n", b"index 6\nextra AA==\n"),
        lambda data: data.replace(b"\nindex 6\n", b"\nextra A\nindex 6\n\n", 1),
        lambda data: data.replace(b"=\n", b"\n", 1),
        lambda data: data.replace(b"=\n\n", b"=\n" + b"A" * 43 + b"=\n" * 64 + b"\n", 1),
        lambda data: data.replace(b"\n11\n", b"\n011\n"),
        lambda data: data.replace(b"\n11\n", b"\n11 \n"),
        lambda data: data.replace(b"\n11\n", b"\n" + b"9" * 19 + b"\n"),
        lambda data: data.replace(b"\n11\n", b"\n\n11\n"),
        lambda data: data.replace("\n\n—".encode(), "\n—".encode()),
        lambda data: data.replace("—".encode(), b"-"),
        lambda data: data.replace("— ".encode(), "—  ".encode()),
        lambda data: data.replace(b"witness.example/w1 ", b"witness.example+w1 "),
        lambda data: data.replace(b"example.com/log\n", b"example.com/log\t\n"),
        lambda data: data.replace(b"example.com/log\n", b"example.com/log\xff\n"),
        lambda data: data.replace("\n\n—".encode(), b"\n\n" + "— a AAAA\n".encode() * 40 + "—".encode()),
        lambda data: data + b"x" * (1 << 17),
    ],
)
def test_a_malformed_proof_is_refused(change):
    assert change(GOOD) != GOOD
    with pytest.raises(FormatError):
        verify(change(GOOD))


def test_every_flipped_byte_and_every_truncation_is_refused():
    """But for the signatures' key ids and names, with which they would be signatures of others."""
    for place in range(GOOD.index("\n\n—".encode())):
        data = bytearray(GOOD)
        data[place] ^= 1
        with pytest.raises((FormatError, SignatureError)):
            verify(bytes(data))
    for size in range(len(GOOD)):
        with pytest.raises((FormatError, SignatureError)):
            verify(GOOD[:size])


@given(data=st.binary(max_size=300), place=st.integers(0, len(GOOD)))
def test_garbage_is_refused(data, place):
    for text in (data, GOOD[:place] + data, data + GOOD[place:]):
        if text != GOOD and not text.startswith(GOOD):
            with pytest.raises((FormatError, SignatureError)):
                verify(text)


def test_a_large_log_is_proved_by_few_hashes():
    random = Random(1)
    entries = [random.randbytes(8) for _ in range(1000)]
    for index in (0, 1, 511, 512, 998, 999):
        assert verify(proof(index, entries, ALL), entries[index]).index == index


def test_shown_as_text():
    assert repr(TRUSTED) == "<TransparencyLog 'example.com/log': 2 of 2 witnesses>"
    assert checkpoint("a", ENTRIES, []).startswith("a\n11\n")
