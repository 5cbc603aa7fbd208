import pytest
from helpers.foundry import nvidia as foundry
from helpers.foundry.authority import NOW

from fastrack import AttestationError, attest
from fastrack.attest._errors import refused
from fastrack.attest._formats import cache
from fastrack.attest._formats import ocsp as _ocsp
from fastrack.attest._gpus import rim as _rim


def counted():
    calls = []

    def function(number, evidence):
        calls.append((number, evidence))
        if number < 0:
            raise refused(evidence, "number", wanted="0 or more", found=number, advice="Count again.")
        return [number]

    return cache.Cache(function, 2), calls


def test_a_result_is_kept_whatever_the_evidence_is_called():
    kept, calls = counted()
    assert kept(1, evidence="one") is kept(1, evidence="two")
    assert len(calls) == 1
    kept.cache_clear()
    kept(1, evidence="one")
    assert len(calls) == 2


def test_an_error_is_not_kept_and_has_the_name():
    kept, calls = counted()
    for name in ("one", "two"):
        with pytest.raises(AttestationError, match=f"the number of the {name} failed"):
            kept(-1, evidence=name)
    assert [name for _, name in calls] == ["", "one", "", "two"]


def test_no_more_are_kept_than_said():
    kept, calls = counted()
    for number in (1, 2, 3, 1):
        kept(number, evidence="one")
    assert len(calls) == 4


def test_what_gpus_have_in_common_is_verified_once(monkeypatch):
    """The manifest, and the responses about its signer's certificates."""
    _rim.open_signed.cache_clear()
    _ocsp._verify_responder.cache_clear()
    digests, signatures = [], []
    whole, one = _rim.canonicalize, _ocsp._verify_signature
    monkeypatch.setattr(_rim, "canonicalize", lambda *args, **options: digests.append(1) or whole(*args, **options))
    monkeypatch.setattr(_ocsp, "_verify_signature", lambda *args: signatures.append(1) or one(*args))
    data, signer = foundry.rim(), foundry.rim_signer()
    responses = foundry.statuses(signer.chain)
    for number in range(8):
        options = {"ocsp": responses, "evidence": f"RIM of GPU {number}"}
        attest.verify_rim(data, now=NOW, roots=signer.roots, **options)
    assert (len(digests), len(signatures)) == (2, 3)
