import ast
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import test_gpu
import test_ocsp
import test_policy_gpu
import test_rim
import test_snp
import test_tdx
from helpers.cases import each
from helpers.foundry import nvidia, snp
from helpers.foundry.authority import NOW
from hypothesis import given
from hypothesis import strategies as st

import fastrack
from fastrack import FormatError, attest
from fastrack.attest import TrustedRoots
from fastrack.attest._errors import malformed, refused


def test_an_error_has_its_parts_and_survives_a_pickle():
    error = refused("TDX quote", "MRTD", wanted=b"\1\2", found=b"\3" * 100, advice="Measure again.")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is fastrack.AttestationError
    assert str(back) == str(error)
    assert (back.evidence, back.field, back.wanted, back.found) == ("TDX quote", "MRTD", "0102", "03" * 100)
    assert str(error).startswith("verifying the MRTD of the TDX quote failed: expected 0102, got 0303")
    assert str(error).endswith("0303.... Measure again.")


def test_a_format_error_may_be_about_text():
    error = malformed("TCB info", "tcbLevels", None, wanted="a list", found=7)
    assert "expected a list as its tcbLevels, got 7" in str(error)


@pytest.mark.parametrize("vendor", ["intel", "amd", "nvidia", "nvidia_rim"])
def test_no_vendor_is_trusted_by_default_where_its_roots_are_given_in_another_way(vendor):
    with pytest.raises(ValueError, match=f"expected other vendors, got {vendor}"):
        TrustedRoots(others={vendor: frozenset()})
    with pytest.raises(ValueError, match="An empty one trusts none"):
        TrustedRoots(**{vendor: None})
    assert getattr(TrustedRoots(**{vendor: frozenset()}), vendor) == frozenset()


def test_no_file_imports_a_private_name_of_another():
    folder = Path(attest.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("fastrack.attest."):
                assert not [each.name for each in node.names if each.name.startswith("_")], (path.name, node.lineno)


# What holds of each kind of evidence: functions that verify a good one, and those that parse bytes, with good bytes.

VERIFY = {
    "TDX": test_tdx.verify,
    "SEV-SNP": test_snp.verify,
    "GPU": test_gpu.verify,
    "RIM": test_rim.verify,
    "OCSP": test_ocsp.verify,
}
PARSE = {
    "TDX": (attest.parse_tdx_quote, test_tdx.QUOTE),
    "SEV-SNP": (attest.parse_snp_report, snp.report(test_snp.MILAN)),
    "GPU": (attest.parse_gpu_report, nvidia.report(nvidia.hopper())),
    "OCSP": (test_ocsp.verify, nvidia.status(test_ocsp.ABOUT, test_ocsp.ISSUER, by=nvidia.responder(test_ocsp.ISSUER))),
}


@each("kind", VERIFY)
def test_what_is_verified_can_be_pickled_and_not_changed(kind):
    verified = VERIFY[kind]()
    assert pickle.loads(pickle.dumps(verified)) == verified
    assert type(verified).__module__ == "fastrack.attest"
    with pytest.raises(FrozenInstanceError):
        verified.verified_at = NOW


@each("act", [*VERIFY.values(), test_policy_gpu.check])
def test_a_time_without_a_zone_is_a_mistake_of_the_caller(act):
    with pytest.raises(ValueError, match="time zone"):
        act(now=NOW.replace(tzinfo=None))


@each("kind", PARSE)
def test_every_truncation_is_malformed(kind):
    parse, data = PARSE[kind]
    for size in range(0, len(data), 1 + len(data) // 4000):
        with pytest.raises(FormatError):
            parse(data[:size])


@given(st.sampled_from(["TDX", "SEV-SNP", "GPU"]), st.binary(max_size=1300))
def test_garbage_is_malformed(kind, data):
    with pytest.raises(FormatError):
        PARSE[kind][0](data)
