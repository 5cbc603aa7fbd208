"""The targets of `make fuzz` on their seeds and on a few hundred inputs made of them. Needs no atheris."""

import base64
import signal
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from fuzz import __main__ as program
from fuzz import mutators, targets
from fuzz.common import Violation
from fuzz.evidence import pack, unpack
from fuzz.targets import guarded
from helpers.cases import each
from helpers.native_code import needs_compiler
from helpers.processes import run_python
from helpers.signed import GRANTS

import fastrack
from fastrack import FormatError, SealedTensor, attest
from fastrack._crypto import derivation, gather, openssl
from fastrack._documents import strict
from fastrack._files import reader
from fastrack._sealed import metadata as files
from fastrack._sets.entries import SealedEntry
from fastrack.attest import _verify_offer
from fastrack.attest._cpu import snp as _snp
from fastrack.attest._cpu import tdx as _tdx
from fastrack.grants import Identity, Verifier

pytest.importorskip("torch")

INPUTS = {"dataset": 50, "file": 75, "metadata": 75, "recombined": 200, "engine": 1500}  # 120 of the others

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


LONG = {"engine", "message"}


def marked(kind):
    return pytest.param(kind, id=kind.name, marks=pytest.mark.nightly) if kind.name in LONG else kind


@pytest.fixture(autouse=True)
def open_files():
    """Leave files that other tests left open out of the count."""
    targets.take_open_files()


@pytest.fixture(params=map(marked, targets.TARGETS), ids=lambda kind: kind.name)
def target(request):
    return request.param()


@pytest.mark.slow  # of many cases
def test_the_seeds_and_what_is_made_of_them_hold(target):
    random = Random(target.name)
    pool = target.seeds()
    for data in (*pool, b""):
        guarded(target, data)
    for _ in range(INPUTS.get(target.name, 120)):
        data = random.choice(pool)
        for _ in range(random.choice([1, 1, 2, 4])):
            data = target.mutate(data, random)
        pool.append(data)
        guarded(target, data)


@pytest.mark.slow
def test_the_same_seed_alters_in_the_same_way(target):
    seed = target.seeds()[0]
    assert target.mutate(seed, Random(3)) == target.mutate(seed, Random(3))
    assert type(target)().seeds() == target.seeds()


def test_a_process_of_the_program_finds_what_compiles_engines(tmp_path):
    needs_compiler()
    with patch.object(program, "subprocess") as processes:
        processes.run.return_value.returncode = 0
        program._fuzz("engine", tmp_path, 1)
    code = "from helpers.native_code import needs_compiler; needs_compiler()"
    run_python(code, cwd=tmp_path, PYTHONPATH=processes.run.call_args.kwargs["env"]["PYTHONPATH"])


# That the targets would tell.


@pytest.mark.parametrize(
    ("name", "seed", "fault", "told"),
    [
        ("message", 2, (fastrack, "to_device", lambda sealed, out, keys: out), "misjudged"),
        ("pair", -1, (Identity, "decrypt", lambda *_: b"secret"), "an altered ciphertext"),
    ],
)
def test_the_targets_of_messages_tell_of_a_tag_that_is_not_checked(monkeypatch, name, seed, fault, told):
    target = targets.make(name)
    data = bytearray(target.seeds()[seed])
    data[-1] ^= 1
    require_told(monkeypatch, target, data, told, *fault)


def taking(claim, truth):
    """Return the fault that takes one part of every context for another."""
    true = derivation.derive_rows

    def derived(secret, headers, contexts, *given):
        return true(secret, headers, [context.replace(claim, truth) for context in contexts], *given)

    return derivation, "derive_rows", derived


def test_the_file_target_tells_of_a_claim_that_is_not_bound(monkeypatch):
    target = targets.make("metadata")
    text = target.seeds()[0].replace(b'"I64","shape":[7]', b'"U64","shape":[7]')
    require_told(monkeypatch, target, text, "nobody sealed", *taking(b"U64", b"I64"))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        # Every commitment is taken for good: messages open under names, types and shapes that they do not have.
        ("commitment", "nobody sealed|the two readers differ"),
        # The last of two members is taken, as Python does it.
        ("twice", "only fastrack takes the file"),
        # A header is refused that has the form of the page.
        ("header", "only the other reader takes the file"),
        # A sound file is refused.
        ("refused", "only the other reader"),
    ],
)
def test_the_target_of_recombined_files_tells_of_a_fault(monkeypatch, fault, told):
    target = targets.make("recombined")
    data = target.seeds()[0]
    if fault == "commitment":
        header, body = mutators.split(data)
        header = header.replace(b"[3,4]", b"[4,3]", 1).replace(rb"\"shape\":[3,4]", rb"\"shape\":[4,3]")
        data = mutators.join(header, body)
        planted = taking(b"[4,3]", b"[3,4]")
    elif fault == "twice":
        header, body = mutators.split(data)
        member = rb"\"a\":{\"dtype\":\"F64\",\"shape\":[3,4]},"
        data = mutators.join(header.replace(rb"\"a\":{", member + rb"\"a\":{", 1), body)
        planted = strict, "unique", dict
    elif fault == "header":
        planted = files, "FORMAT_VERSION", "2"
    else:
        planted = SealedTensor, "proof", refuse
    require_told(monkeypatch, target, data, told, *planted)


def refuse(*_):
    raise fastrack.AuthenticationError("refused")


def test_the_manifest_target_tells_of_a_signature_and_a_header_that_are_not_checked(monkeypatch):
    target = targets.make("manifest")
    payload, envelope = target.seeds()[0][1:], target.seeds()[2][1:]
    other = payload.replace(b'"lineage":"5', b'"lineage":"6')
    forged = b"\0" + envelope.replace(base64.b64encode(payload), base64.b64encode(other))
    require_told(monkeypatch, target, forged, "nothing signed", Verifier, "verify", lambda *_: None)
    place = payload.index(b'"x":["F64",[2],"') + 16
    other = b"\1" + payload[:place] + (b"B" if payload[place] == ord("A") else b"A") + payload[place + 1 :]
    require_told(monkeypatch, target, other, "taken for another", SealedEntry, "_check_sealed", lambda *_: None)


@pytest.mark.parametrize(
    ("name", "module", "curve", "offset"), [("tdx", _tdx, "P256", 4 + 48 + 136), ("snp", _snp, "P384", 4 + 0x90)]
)
def test_the_targets_of_evidence_tell_of_a_signature_that_is_not_checked(monkeypatch, name, module, curve, offset):
    target = targets.make(name)
    data = bytearray(target.seeds()[0])
    data[offset] ^= 1  # in the measurement
    careless = SimpleNamespace(verify=lambda *_, **__: None, load_point=lambda *_, **__: None)
    require_told(monkeypatch, target, data, "nothing signed", module, curve, careless)


def test_the_file_target_tells_of_an_error_that_is_not_documented(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    target = targets.make("file")
    monkeypatch.setattr(reader, "set_up", fail)
    with pytest.raises(ZeroDivisionError):
        guarded(target, target.seeds()[0])


def openssl_target(monkeypatch):
    monkeypatch.setattr("helpers.engines.NAMES", ["openssl"])  # as others are compiled here
    return targets.make("engine")


def run_many(target):
    for number in range(100):
        target.run(bytes([number]))


def require_told(monkeypatch, target, data, match, *fault):
    """Require that a target holds for an input, and no longer once a part of a module is replaced."""
    guarded(target, bytes(data))
    with monkeypatch.context() as patch:
        patch.setattr(*fault)
        with pytest.raises(AssertionError, match=match):
            guarded(target, bytes(data))


@each(
    ("method", "told"),
    [
        ("derive_keys", "misjudged a commitment|derived something else"),
        ("seal_run", "sealed something else"),
        ("open_run", "misjudged a run|opened a run to something else"),
        ("verify_run", "misjudged what it verified"),
        ("open_gather", "followed a plan that is not sound|misjudged a gather|gathered something else"),
    ],
)
def test_the_engine_target_tells_of_an_engine_that_does_nothing(monkeypatch, method, told):
    target = openssl_target(monkeypatch)
    monkeypatch.setattr(openssl.OpenSSLEngine, method, lambda *_: None)
    with pytest.raises(AssertionError, match=f"openssl ({told})"):
        run_many(target)


@pytest.mark.parametrize(
    ("answer", "told"), [(False, "refused a plan that is sound"), (True, "not sound|wrote before it refused")]
)
def test_the_engine_target_tells_of_plans_that_are_misjudged(monkeypatch, answer, told):
    target = openssl_target(monkeypatch)
    monkeypatch.setattr(gather, "is_inside", lambda *_: answer)
    with pytest.raises((AssertionError, IndexError), match=told):  # OpenSSL's engine is Python, and safe
        run_many(target)


@each(("at_end", "place"), [(True, 100), (False, -1)])
@each("change", ["", " = 1"])
@pytest.mark.slow
def test_a_byte_too_many_ends_the_process(at_end, place, change):
    code = f"""
import ctypes
from helpers.buffers import Guarded
data = Guarded(100).take(100, at_end={at_end})
memory = (ctypes.c_ubyte * 100).from_address(data.ctypes.data)
print(sum(memory), flush=True)
ctypes.c_ubyte.from_address(data.ctypes.data + {place}).value{change}
print("that was possible")
"""
    # In development mode Python tells where.
    assert run_python(code, status=-signal.SIGSEGV, PYTHONDEVMODE="") == "0\n"


class Idle:
    @staticmethod
    def run(_data):
        pass


def test_memory_out_of_proportion_is_told(monkeypatch):
    peaks = iter([1000, 1000 + targets.MEMORY // 1024, 1000, 1001 + targets.MEMORY // 1024])
    monkeypatch.setattr(targets.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=next(peaks)))
    guarded(Idle, b"")
    with pytest.raises(Violation, match="of memory"):
        guarded(Idle, b"")


def test_files_that_are_left_open_are_told(tmp_path):
    held = []

    class Forgetful:
        @staticmethod
        def run(_data):
            held.extend((tmp_path / str(number)).open("wb") for number in range(targets.FILES + 10))

    with pytest.raises(Violation, match="left open"):
        guarded(Forgetful, b"")
    targets.take_open_files()
    guarded(Idle, b"")
    for file in held:
        file.close()


def test_the_exchange_target_tells_of_a_binding_that_is_not_checked(monkeypatch):
    target = targets.make("exchange")
    challenge, offer, grants = unpack(target.seeds()[0], 3)
    known = attest.Offer.from_bytes(offer)
    nonce = attest.OfferBinding(attest.Challenge.from_bytes(challenge), known.recipient).device_nonce(0)
    other = replace(known, recipient=Identity.generate().recipient)
    data = pack([challenge, other.to_bytes(), grants])
    guarded(target, data)
    monkeypatch.setattr(_verify_offer, "_require_report_data", lambda *_: None)
    monkeypatch.setattr(attest.OfferBinding, "device_nonce", lambda *_: nonce)
    with pytest.raises(AssertionError, match="no machine made"):
        guarded(target, data)


def test_the_grants_target_tells_of_a_signature_that_is_not_checked(monkeypatch):
    target = targets.make("grants")
    data = target.seeds()[1].replace(b"text", GRANTS.encode())
    require_told(monkeypatch, target, data, "without a signature", Verifier, "verify", lambda *_: None)


def test_there_is_no_other_target():
    with pytest.raises(ValueError, match="there are file, metadata"):
        targets.make("nothing")
    assert issubclass(FormatError, ValueError)
