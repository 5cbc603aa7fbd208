from __future__ import annotations

import pickle
import re
from datetime import timedelta

import pytest
from helpers.foundry import snp as amd
from helpers.foundry import tdx as intel
from helpers.foundry.authority import NOW
from hypothesis import given
from hypothesis import strategies as st

from fastrack import AttestationError, FormatError, attest
from fastrack.attest import Policy, Revocation, SnpPolicy, TdxPolicy

DAY = timedelta(days=1)
GOOD, BAD = "22" * 48, "23" * 48


def tdx(text=""):
    return Policy.from_toml(f"version = 1\n[cpu.tdx]\nmrtd = ['{GOOD}']\n{text}")


def snp(text=""):
    return Policy.from_toml(f"version = 1\n[cpu.snp]\nmeasurement = ['{GOOD}']\nrevocation = 'none'\n{text}")


def quote(*, info=None, **body):
    return attest.verify_tdx_quote(
        intel.quote(PLATFORM, body=intel.td_report(**body), version=5, body_type=2),
        attest.TdxCollateral(**intel.collateral(info=info)),
        now=NOW,
        roots=intel.intel().roots,
    )


def report(*, machine=None, crl=None, **fields):
    machine = machine or CHIP
    roots = amd.amd(machine.product).roots
    data = amd.report(machine, **fields)
    return attest.verify_snp_report(data, machine.leaf, machine.issuers, now=NOW, roots=roots, crl=crl)


PLATFORM, CHIP = intel.platform(), amd.chip()
PPID, CHIP_ID = intel.PPID.hex(), amd.CHIP_ID.hex()
OUTDATED = {"levels": [intel.tcb_level(status="OutOfDate", advisories=["INTEL-SA-1"])]}
REGISTERS = {
    "mrseam": "11" * 48,
    "mrconfigid": "33" * 48,
    "mrowner": "44" * 48,
    "mrownerconfig": "55" * 48,
    **{f"rtmr{number}": f"6{number}" * 48 for number in range(4)},
}


# TDX.


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"platforms = ['{PPID}']",
        "max_collateral_age_days = 1",
        "min_evaluation_number = 17",
        "refused_advisories = ['INTEL-SA-9']",
        "tcb_status = ['OutOfDate', 'UpToDate']",
        *(f"{name} = ['{BAD}', '{value}']" for name, value in REGISTERS.items()),
        "rtmr3 = 'any'",
    ],
)
def test_a_quote_that_fits_the_policy_is_accepted(text):
    assert tdx(text).check_cpu(quote(), now=NOW) is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (f"platforms = ['{'00' * 16}']", "PPID"),
        ("max_collateral_age_days = 0", "age of the collateral"),
        ("min_evaluation_number = 18", "evaluation number"),
        ("tcb_status = ['OutOfDate']", "TCB status"),
        *((f"{name} = ['{BAD}']", name.upper()) for name in REGISTERS),
        (f"mrservicetd = ['{'00' * 48}']", "MRSERVICETD"),
    ],
)
def test_a_quote_that_does_not_fit_is_refused(text, field):
    with pytest.raises(AttestationError, match=re.escape(text.split(" = ")[0])) as raised:
        tdx(text).check_cpu(quote(), now=NOW)
    assert (raised.value.evidence, raised.value.field) == ("TDX quote", field)
    assert raised.value.found is not None


def test_another_initial_memory_is_refused():
    with pytest.raises(AttestationError, match="MRTD"):
        tdx().check_cpu(quote(mrtd=bytes(48)), now=NOW)
    Policy.from_toml("version = 1\n[cpu.tdx]\nmrtd = 'any'").check_cpu(quote(mrtd=bytes(48)), now=NOW)


@pytest.mark.parametrize(("bits", "name"), [(1, "debug"), (1 << 29, "migration")])
def test_debug_and_migration_are_refused_unless_allowed(bits, name):
    verified = quote(attributes=bits)
    with pytest.raises(AttestationError, match=f"{name} bit"):
        tdx().check_cpu(verified, now=NOW)
    tdx(f"allow_{name} = true").check_cpu(verified, now=NOW)


def test_an_outdated_platform_is_refused_unless_allowed():
    verified = quote(info=intel.tcb_info(**OUTDATED))
    with pytest.raises(AttestationError, match="TCB status"):
        tdx().check_cpu(verified, now=NOW)
    tdx("tcb_status = ['OutOfDate']").check_cpu(verified, now=NOW)
    with pytest.raises(AttestationError, match="INTEL-SA-1"):
        tdx("tcb_status = ['OutOfDate']\nrefused_advisories = ['INTEL-SA-1']").check_cpu(verified, now=NOW)


# SEV-SNP.


@pytest.mark.parametrize(
    "text",
    [
        "",
        "products = ['Turin', 'Milan']",
        f"chip_ids = ['{CHIP_ID}']",
        "min_tcb = { bootloader = 3, snp = 8, microcode = 115, fmc = 9 }",
        "max_vmpl = 3",
        "require_alias_check = true",
        f"host_data = ['{'33' * 32}']",
        f"id_key_digest = ['{'44' * 48}']",
        f"author_key_digest = ['{'55' * 48}']",
        f"family_id = ['{'01' * 16}']",
        f"image_id = ['{'02' * 16}']",
    ],
)
def test_a_report_that_fits_the_policy_is_accepted(text):
    assert snp(text).check_cpu(report(), now=NOW) is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("products = ['Turin']", "product"),
        (f"chip_ids = ['{'00' * 64}']", "CHIP_ID"),
        ("min_tcb = { microcode = 116 }", "microcode patch level"),
        ("min_tcb = { tee = 1 }", "tee patch level"),
        ("allow_smt = false", "SMT bit"),
        (f"host_data = ['{'00' * 32}']", "HOST_DATA"),
        (f"id_key_digest = ['{'00' * 48}']", "ID_KEY_DIGEST"),
        (f"author_key_digest = ['{'00' * 48}']", "AUTHOR_KEY_DIGEST"),
        (f"family_id = ['{'00' * 16}']", "FAMILY_ID"),
        (f"image_id = ['{'00' * 16}']", "IMAGE_ID"),
    ],
)
def test_a_report_that_does_not_fit_is_refused(text, field):
    with pytest.raises(AttestationError, match=re.escape(text.split(" = ")[0])) as raised:
        snp(text).check_cpu(report(), now=NOW)
    assert (raised.value.evidence, raised.value.field) == ("SNP report", field)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"measurement": bytes(48)}, "MEASUREMENT"),
        ({"policy": 0x20000 | 1 << 19}, "debug bit"),
        ({"policy": 0x20000 | 1 << 18}, "migration bit"),
        ({"vmpl": 1}, "VMPL"),
    ],
)
def test_a_report_that_is_unsafe_is_refused_by_default(fields, said):
    with pytest.raises(AttestationError, match=said):
        snp().check_cpu(report(**fields), now=NOW)


def test_unsafe_reports_may_be_allowed():
    text = "allow_debug = true\nallow_migration = true\nmax_vmpl = 1"
    snp(text).check_cpu(report(policy=0x20000 | 3 << 18, vmpl=1), now=NOW)


def test_a_platform_that_did_not_check_its_memory_is_refused_if_asked():
    verified = report(platform_info=0)
    snp().check_cpu(verified, now=NOW)
    with pytest.raises(AttestationError, match="aliases"):
        snp("require_alias_check = true").check_cpu(verified, now=NOW)


def test_the_fmc_of_turin_has_a_floor():
    verified = report(machine=amd.chip("Turin"))
    snp("min_tcb = { fmc = 2 }").check_cpu(verified, now=NOW)
    with pytest.raises(AttestationError, match="fmc"):
        snp("min_tcb = { fmc = 3 }").check_cpu(verified, now=NOW)


@pytest.mark.parametrize(
    ("revocation", "accepted"),
    [("none", {None, 1, 9}), ("cached", {1, 9}), ("required", {1})],
)
def test_revocation_is_asked_for_as_the_policy_says(revocation, accepted):
    policy = Policy.from_toml(f"version = 1\n[cpu.snp]\nmeasurement = 'any'\nrevocation = '{revocation}'")
    assert policy.snp.revocation is Revocation(revocation)
    for days in (None, 1, 9):
        crl = days and amd.amd("Milan").ark.crl(start=NOW - days * DAY)
        verified = report(crl=crl)
        assert verified.revocation_checked_at == (days and NOW - days * DAY)
        if days in accepted:
            policy.check_cpu(verified, now=NOW)
        else:
            with pytest.raises(AttestationError, match="revocation"):
                policy.check_cpu(verified, now=NOW)


def test_a_list_may_have_to_be_of_this_moment():
    text = "version = 1\n[cpu.snp]\nmeasurement = 'any'\nrevocation = 'required'\nmax_revocation_age_days = 0"
    policy = Policy.from_toml(text)
    assert policy.snp.max_revocation_age == timedelta(0)
    policy.check_cpu(report(crl=amd.amd("Milan").ark.crl(start=NOW)), now=NOW)
    with pytest.raises(AttestationError, match="revocation"):
        policy.check_cpu(report(crl=amd.amd("Milan").ark.crl()), now=NOW)


def test_revocation_is_asked_for_by_default():
    assert SnpPolicy({}).revocation is Revocation.CACHED
    assert Policy.from_toml("version = 1\n[cpu.snp]\nmeasurement = 'any'").snp == SnpPolicy({})


# Both.


def test_a_kind_that_the_policy_does_not_name_is_refused():
    with pytest.raises(AttestationError, match=r"\[cpu.snp\]"):
        tdx().check_cpu(report(), now=NOW)
    with pytest.raises(AttestationError, match=r"\[cpu.tdx\]"):
        snp().check_cpu(quote(), now=NOW)
    with pytest.raises(AttestationError):
        Policy.from_toml("version = 1").check_cpu(quote(), now=NOW)


def test_what_was_only_parsed_is_not_judged():
    parsed = attest.parse_tdx_quote(intel.quote(PLATFORM))
    for thing in (parsed, parsed.report, attest.parse_snp_report(amd.report(CHIP)), None):
        with pytest.raises(TypeError, match="verify the evidence first"):
            tdx().check_cpu(thing, now=NOW)


@pytest.mark.parametrize("make", [quote, report])
def test_what_was_verified_is_judged_while_it_is_valid(make):
    verified = make()
    policy = Policy(tdx=TdxPolicy({}), snp=SnpPolicy({}, revocation=Revocation.NONE))
    policy.check_cpu(verified, now=verified.valid_until)
    for now in (NOW - DAY, verified.valid_until + DAY):
        with pytest.raises(AttestationError, match="validity"):
            policy.check_cpu(verified, now=now)
    with pytest.raises(ValueError, match="time zone"):
        policy.check_cpu(verified, now=NOW.replace(tzinfo=None))


# TOML.


def test_a_policy_is_read_from_a_file(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(f"version = 1\n[cpu.tdx]\nmrtd = ['{GOOD}']\n")
    policy = Policy.from_toml(path)
    assert policy == tdx()
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert policy.tdx == TdxPolicy({"mrtd": frozenset({bytes.fromhex(GOOD)})})


@pytest.mark.parametrize("content", [b"\xff", b"#" * (1 << 20 | 1)])
def test_a_file_that_is_no_text_or_too_long_is_refused(tmp_path, content):
    path = tmp_path / "policy.toml"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"policy\.toml"):
        Policy.from_toml(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "version"),
        ("version = 2", "version"),
        ("version = true", "version"),
        ("version = '1'", "version"),
        ("version = ", "TOML"),
        ("policies/policy.toml", "Pass pathlib.Path('policies/policy.toml')"),
        ("version = 1\ngpus = 3", "gpus"),
        ("version = 1\ncpu = 3", "a table as cpu, got 3"),
        ("version = 1\n[cpu.sgx]", "cpu.sgx"),
        ("version = 1\n[cpu.tdx]", "mrtd, got none"),
        ("version = 1\n[cpu.snp]", "measurement, got none"),
        ("version = 1\n[cpu.tdx]\nmrtd = []", "not empty"),
        ("version = 1\n[cpu.tdx]\nmrtd = 'all'", "mrtd"),
        ("version = 1\n[cpu.tdx]\nmrtd = ['22']", "48 bytes"),
        ("version = 1\n[cpu.tdx]\nmrtd = [22]", "48 bytes"),
        (f"version = 1\n[cpu.tdx]\nmrtd = ['{'zz' * 48}']", "48 bytes"),
        ("version = 1\n[cpu.tdx]\nmrtd = 'any'\nmrdt = []", "cpu.tdx.mrdt"),
        ("version = 1\n[cpu.tdx]\nmrtd = 'any'\ntcb_status = ['Fine']", "UpToDate, SWHardeningNeeded"),
        ("version = 1\n[cpu.tdx]\nmrtd = 'any'\ntcb_status = 'UpToDate'", "a list"),
        ("version = 1\n[cpu.tdx]\nmrtd = 'any'\nallow_debug = 1", "true or false"),
        ("version = 1\n[cpu.tdx]\nmrtd = 'any'\nallow_debug = 'false'", "true or false"),
        ("version = 1\n[cpu.tdx]\nmrtd = 'any'\nmin_evaluation_number = -1", "an integer from 0"),
        ("version = 1\n[cpu.tdx]\nmrtd = 'any'\nmax_collateral_age_days = 99999", "36500"),
        ("version = 1\n[cpu.tdx]\nmrtd = 'any'\nmax_collateral_age_days = 1.5", "an integer"),
        ("version = 1\n[cpu.snp]\nmeasurement = 'any'\nrevocation = 'maybe'", "required, cached, none"),
        ("version = 1\n[cpu.snp]\nmeasurement = 'any'\nmin_tcb = { ucode = 1 }", "cpu.snp.min_tcb.ucode"),
        ("version = 1\n[cpu.snp]\nmeasurement = 'any'\nproducts = ['Rome']", "Milan, Genoa, Turin"),
        ("version = 1\n[cpu.snp]\nmeasurement = 'any'\nchip_id = []", "cpu.snp.chip_id"),
    ],
)
def test_a_mistake_in_a_policy_is_named(text, said):
    with pytest.raises(FormatError, match=re.escape(said)):
        Policy.from_toml(text)


@given(st.text(max_size=100))
def test_garbage_is_no_policy(text):
    with pytest.raises(FormatError):
        Policy.from_toml(text)


def test_an_error_says_which_values_are_allowed():
    with pytest.raises(AttestationError) as raised:
        tdx(f"rtmr0 = ['{BAD}', '{GOOD}']").check_cpu(quote(), now=NOW)
    assert raised.value.found == "60" * 48
    assert "cpu.tdx.rtmr0" in raised.value.wanted
    assert "Do not give the key" in str(raised.value)
