import pickle
import re
from datetime import timedelta

import pytest
from helpers.cases import each
from helpers.foundry import snp as amd
from helpers.foundry import tdx as intel
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, roots
from helpers.foundry.machine import policy as machine_policy
from hypothesis import given
from hypothesis import strategies as st

from fastrack import AttestationError, FormatError, attest
from fastrack.attest import Policy, Revocation, SnpPolicy, TdxPolicy
from fastrack.attest._kinds import kind_of_verified

DAY = timedelta(days=1)
GOOD, BAD = "22" * 48, "23" * 48


def tdx(text=""):
    """Make a policy with the lines that every one must have, and others, which replace them."""
    lines = {"mrtd": f"['{GOOD}']", "rtmr1": "'any'", "rtmr2": "'any'"}
    return Policy.from_toml(f"version = 1\n[cpu.tdx]\n{with_lines(lines, text)}")


def snp(text=""):
    lines = {"measurement": f"['{GOOD}']", "min_tcb": "'any'", "revocation": "'none'"}
    return Policy.from_toml(f"version = 1\n[cpu.snp]\n{with_lines(lines, text)}")


def with_lines(lines, text):
    kept = [f"{key} = {value}\n" for key, value in lines.items() if f"{key} = " not in text]
    return "".join(kept) + text


def quote(*, info=None, identity=None, **body):
    data = intel.quote(PLATFORM, body=intel.td_report(**body), version=5, body_type=body.get("body_type", 2))
    collateral = attest.TdxCollateral(**intel.collateral(info=info, identity=identity))
    return attest.verify_tdx_quote(data, collateral, now=NOW, roots=intel.intel().roots)


def report(*, machine=None, crl=None, **fields):
    machine = machine or CHIP
    roots = amd.amd(machine.product).roots
    data = amd.report(machine, **fields)
    return attest.verify_snp_report(data, machine.leaf, machine.issuers, now=NOW, roots=roots, crl=crl)


PLATFORM, CHIP = intel.platform(), amd.chip()
PPID, CHIP_ID = intel.PPID.hex(), amd.CHIP_ID.hex()
ANY_TDX, ANY_SNP = dict.fromkeys(("mrtd", "rtmr1", "rtmr2")), {"measurement": None}
OUTDATED = {"levels": [intel.tcb_level(status="OutOfDate", advisories=["INTEL-SA-1"])]}
REGISTERS = {
    "mrseam": "11" * 48,
    "mrconfigid": "33" * 48,
    "mrowner": "44" * 48,
    "mrownerconfig": "55" * 48,
    **{f"rtmr{number}": f"6{number}" * 48 for number in range(4)},
}


# TDX.


@each(
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
        "mrservicetd = 'any'",
        "td_attributes = ['0000004000000000', '0000001000000000']",
        "xfam = ['e71a060000000000']",
    ],
)
def test_a_quote_that_fits_the_policy_is_accepted(text):
    assert tdx(text).check_cpu(quote(), now=NOW) is None


@each(
    ("text", "field"),
    [
        (f"platforms = ['{'00' * 16}']", "PPID"),
        ("max_collateral_age_days = 0", "age of the collateral"),
        ("min_evaluation_number = 18", "evaluation number"),
        ("tcb_status = ['OutOfDate']", "TCB status"),
        *((f"{name} = ['{BAD}']", name.upper()) for name in REGISTERS),
        (f"mrservicetd = ['{BAD}']", "MRSERVICETD"),
        ("td_attributes = ['0000004000000000']", "TDATTRIBUTES"),
        ("xfam = ['e702060000000000']", "XFAM"),
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
    tdx("mrtd = 'any'").check_cpu(quote(mrtd=bytes(48)), now=NOW)


@pytest.mark.parametrize("register", ["rtmr1", "rtmr2"])
def test_another_kernel_or_command_line_is_refused_with_the_same_firmware(register):
    rtmrs = [bytes(48) if f"rtmr{number}" == register else bytes([0x60 + number]) * 48 for number in range(4)]
    with pytest.raises(AttestationError, match=f"cpu.tdx.{register}"):
        tdx(f"{register} = ['{REGISTERS[register]}']").check_cpu(quote(rtmrs=rtmrs), now=NOW)
    tdx(f"{register} = 'any'").check_cpu(quote(rtmrs=rtmrs), now=NOW)


@each(
    ("fields", "name"),
    [
        ({"attributes": 0}, "TDATTRIBUTES"),  # without SEPT_VE_DISABLE
        ({"attributes": 1 << 28 | 1 << 30}, "TDATTRIBUTES"),
        ({"attributes": 1 << 28 | 1 << 63}, "TDATTRIBUTES"),
        ({"xfam": 0x61AE5}, "XFAM"),
        ({"xfam": 0x61AE7 | 1 << 20}, "XFAM"),
        ({"mrservicetd": b"\x70" * 48}, "MRSERVICETD"),
    ],
)
def test_an_unusual_td_is_refused_unless_its_value_is_listed(fields, name):
    verified = quote(body_type=3, **fields)
    with pytest.raises(AttestationError) as raised:
        tdx().check_cpu(verified, now=NOW)
    assert raised.value.field == name
    key = {"TDATTRIBUTES": "td_attributes"}.get(name, name.lower())
    value = getattr(verified.report, key)
    listed = value.hex() if isinstance(value, bytes) else value.to_bytes(8, "little").hex()
    tdx(f"{key} = ['{listed}']").check_cpu(verified, now=NOW)


def test_listed_attributes_do_not_allow_a_debugger():
    verified = quote(attributes=1 << 28 | 1)
    with pytest.raises(AttestationError, match="debug bit"):
        tdx("td_attributes = ['0100001000000000']").check_cpu(verified, now=NOW)


def test_collateral_has_an_age_and_a_number_by_default():
    old = quote(info=intel.tcb_info(start=NOW - 31 * DAY))
    with pytest.raises(AttestationError, match="max_collateral_age_days"):
        tdx().check_cpu(old, now=NOW)
    tdx("max_collateral_age_days = 31").check_cpu(old, now=NOW)
    low = quote(info=intel.tcb_info(tcbEvaluationDataNumber=16))
    with pytest.raises(AttestationError, match="min_evaluation_number"):
        tdx().check_cpu(low, now=NOW)
    for number in (16, 0):
        tdx(f"min_evaluation_number = {number}").check_cpu(low, now=NOW)


@pytest.mark.parametrize(("bits", "name"), [(1, "debug"), (1 << 29, "migration")])
def test_debug_and_migration_are_refused_unless_allowed(bits, name):
    verified = quote(attributes=1 << 28 | bits)
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


BIOS, MODULE, ENCLAVE = (
    f"needs a newer {name} on the host" for name in ("BIOS with its microcode", "TDX module", "quoting enclave")
)


@each(
    ("platform", "module", "enclave", "accepted", "told"),
    [
        ("OutOfDate", "UpToDate", "UpToDate", "", {"platform": f"OutOfDate, 2026-03-13, {BIOS}"}),
        ("UpToDate", "OutOfDate", "UpToDate", "", {"module": f"OutOfDate, 2026-03-13, {MODULE}"}),
        ("UpToDate", "UpToDate", "Revoked", "", {"quoting_enclave": f"Revoked, 2026-03-13, {ENCLAVE}"}),
        (
            "SWHardeningNeeded",
            "OutOfDate",
            "OutOfDate",
            "SWHardeningNeeded",
            {"module": f"OutOfDate, 2026-03-13, {MODULE}", "quoting_enclave": f"OutOfDate, 2026-03-13, {ENCLAVE}"},
        ),
        (
            "OutOfDateConfigurationNeeded",
            "UpToDate",
            "UpToDate",
            "OutOfDate",
            {"platform": f"OutOfDateConfigurationNeeded, 2026-03-13, {BIOS} and other settings of the BIOS"},
        ),
        (
            "ConfigurationAndSWHardeningNeeded",
            "UpToDate",
            "UpToDate",
            "",
            {
                "platform": "ConfigurationAndSWHardeningNeeded, 2026-03-13, needs other settings of the BIOS and "
                "software as its advisories say"
            },
        ),
        (  # each part is accepted, and what they are together is not
            "ConfigurationNeeded",
            "OutOfDate",
            "UpToDate",
            "OutOfDate', 'ConfigurationNeeded",
            {
                "platform": "ConfigurationNeeded, 2026-03-13, needs other settings of the BIOS",
                "module": f"OutOfDate, 2026-03-13, {MODULE}",
                "quoting_enclave": "UpToDate, 2026-03-13",
            },
        ),
    ],
)
def test_a_part_of_the_platform_that_is_behind_is_named_with_what_it_needs(platform, module, enclave, accepted, told):
    modules = [intel.module(levels=[intel.svn_level(3, module)])]
    info = intel.tcb_info(levels=[intel.tcb_level(status=platform)], modules=modules)
    verified = quote(info=info, identity=intel.qe_identity(levels=[intel.svn_level(4, enclave)]))
    said = f"By its parts: {'; '.join(f'{name}: {state}' for name, state in told.items())}. Do not give the key"
    with pytest.raises(AttestationError, match=re.escape(said)) as error:
        tdx(f"tcb_status = ['{accepted or 'UpToDate'}']").check_cpu(verified, now=NOW)
    assert (error.value.field, error.value.found) == ("TCB status", verified.tcb.status)
    claims = kind_of_verified(verified).describe(verified)["tcb_parts"]
    assert set(claims) == {"platform", "module", "quoting_enclave"}
    assert claims.items() >= told.items()
    comment = next(line for line in attest.draft_policy(verified).splitlines() if "TCB status of the platform" in line)
    assert all(f"{name}: {state}" in comment for name, state in told.items() if "UpToDate" not in state)


def test_a_module_without_levels_of_its_own_is_no_part():
    body = {"tee_tcb_svn": bytes([5, 0, 2, *bytes(13)])}
    verified = quote(info=intel.tcb_info(levels=[intel.tcb_level(tdx=(5, 0, 2), status="OutOfDate")]), **body)
    with pytest.raises(AttestationError, match=r"By its parts: platform: OutOfDate, .* on the host\. Do not"):
        tdx().check_cpu(verified, now=NOW)
    assert set(kind_of_verified(verified).describe(verified)["tcb_parts"]) == {"platform", "quoting_enclave"}


# SEV-SNP.


@each(
    "text",
    [
        "",
        "products = ['Turin', 'Milan']",
        f"chip_ids = ['{CHIP_ID}']",
        "products = ['Milan', 'Turin']\nmin_tcb = { bootloader = 3, snp = 8, microcode = 115, fmc = 9 }",
        "signing_key = 'VCEK'",
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


@each(
    ("text", "field"),
    [
        ("products = ['Turin']", "product"),
        (f"chip_ids = ['{'00' * 64}']", "CHIP_ID"),
        ("min_tcb = { microcode = 116 }", "reported microcode patch level"),
        ("min_tcb = { tee = 1 }", "reported tee patch level"),
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


@each(
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


@pytest.mark.parametrize("kind", ["committed", "launch"])
def test_a_platform_that_can_go_back_or_started_the_guest_on_less_is_refused(kind):
    verified = report(**{f"{kind}_tcb": {"microcode": 114}})
    snp("min_tcb = { microcode = 114 }").check_cpu(verified, now=NOW)
    with pytest.raises(AttestationError, match="microcode") as raised:
        snp("min_tcb = { microcode = 115 }").check_cpu(verified, now=NOW)
    assert raised.value.field == f"{kind} microcode patch level"
    snp("min_tcb = 'any'").check_cpu(verified, now=NOW)


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


@each(
    "text",
    [
        "min_tcb = { fmc = 3 }",
        "min_tcb = { snp = 8, fmc = 3 }",
        "min_tcb = { snp = 8, fmc = 0 }",
        "products = ['Milan', 'Turin']\nmin_tcb = { fmc = 3 }",
    ],
)
@each("product", ["Milan", "Genoa"])
def test_a_floor_for_a_level_that_a_product_lacks_refuses_it_unless_products_are_named(text, product):
    none = {"bootloader": 0, "snp": 0, "microcode": 0}
    for levels in ({}, none):
        machine = amd.chip(product, tcb=levels)
        with pytest.raises(AttestationError, match=rf"got none of {product}.*change the policy") as error:
            snp(text.replace("Milan", product)).check_cpu(report(machine=machine, tcb=levels), now=NOW)
        assert (error.value.evidence, error.value.field) == ("SNP report", "fmc patch level")


def test_a_chip_is_judged_by_its_certificate_where_the_host_masks_its_id():
    other, masked = "07" * 64, report(chip_id=b"")
    snp().check_cpu(masked, now=NOW)
    snp(f"chip_ids = ['{CHIP_ID}']").check_cpu(masked, now=NOW)
    for ids in (other, "00" * 64):
        with pytest.raises(AttestationError, match=r"cpu\.snp\.chip_ids") as error:
            snp(f"chip_ids = ['{ids}']").check_cpu(masked, now=NOW)
        assert (error.value.field, error.value.found) == ("CHIP_ID", CHIP_ID)
    unknown = report(machine=amd.chip(is_vlek=True), chip_id=b"")
    for ids in (CHIP_ID, "00" * 64):
        with pytest.raises(AttestationError, match=r"CHIP_ID.*got none"):
            snp(f"chip_ids = ['{ids}']").check_cpu(unknown, now=NOW)


def test_the_signing_key_and_its_provider_are_judged():
    vcek, vlek = report(), report(machine=amd.chip(is_vlek=True))
    for verified in (vcek, vlek):
        snp().check_cpu(verified, now=NOW)
    for text in (
        "signing_key = 'VLEK'",
        "providers = ['Cloud', 'Other']",
        "signing_key = 'VLEK'\nproviders = ['Cloud']",
    ):
        snp(text).check_cpu(vlek, now=NOW)
    for text, verified, field in (  # by the last line
        ("signing_key = 'VCEK'", vlek, "SIGNING_KEY"),
        ("signing_key = 'VLEK'", vcek, "SIGNING_KEY"),
        ("providers = ['cloud']", vlek, "provider"),
        ("providers = ['Cloud']", vcek, "provider"),
        ("signing_key = 'VCEK'\nproviders = ['Cloud']", vcek, "provider"),
    ):
        with pytest.raises(AttestationError) as error:
            snp(text).check_cpu(verified, now=NOW)
        key = text.rpartition("\n")[2].partition(" ")[0]
        assert (error.value.field, f"cpu.snp.{key}" in error.value.wanted) == (field, True)


@each(
    ("revocation", "accepted"),
    [
        ("'none'", {None, 1, 9}),
        ("'cached'", {1, 9}),
        ("'required'", {1, 9}),  # a list is good for as long as AMD says
        ("'required'\nmax_revocation_age_days = 1", {1}),
    ],
)
def test_revocation_is_asked_for_as_the_policy_says(revocation, accepted):
    policy = snp(f"measurement = 'any'\nrevocation = {revocation}")
    assert policy.snp.revocation is Revocation(revocation.split("'")[1])
    for days in (None, 1, 9):
        crl = days and amd.amd("Milan").ark.crl(start=NOW - days * DAY)
        verified = report(crl=crl)
        assert verified.revocation_checked_at == (days and NOW - days * DAY)
        if days in accepted:
            policy.check_cpu(verified, now=NOW)
        else:
            with pytest.raises(AttestationError, match=r"revocation.*`fastrack attest fetch`"):
                policy.check_cpu(verified, now=NOW)


def test_a_list_may_have_to_be_of_this_moment():
    policy = snp("revocation = 'required'\nmax_revocation_age_days = 0")
    assert policy.snp.max_revocation_age == timedelta(0)
    policy.check_cpu(report(crl=amd.amd("Milan").ark.crl(start=NOW)), now=NOW)
    with pytest.raises(AttestationError, match="revocation"):
        policy.check_cpu(report(crl=amd.amd("Milan").ark.crl()), now=NOW)


def test_revocation_is_asked_for_by_default():
    assert SnpPolicy(ANY_SNP, {}).revocation is Revocation.CACHED
    text = "version = 1\n[cpu.snp]\nmeasurement = 'any'\nmin_tcb = 'any'"
    assert Policy.from_toml(text).snp == SnpPolicy(ANY_SNP, {})


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
    policy = Policy(tdx=TdxPolicy(ANY_TDX), snp=SnpPolicy(ANY_SNP, {}, revocation=Revocation.NONE))
    policy.check_cpu(verified, now=verified.valid_until)
    for now in (NOW - DAY, verified.valid_until + DAY):
        with pytest.raises(AttestationError, match="validity"):
            policy.check_cpu(verified, now=now)
    with pytest.raises(ValueError, match="time zone"):
        policy.check_cpu(verified, now=NOW.replace(tzinfo=None))


# TOML.


def test_a_policy_is_read_from_a_file(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(f"version = 1\n[cpu.tdx]\nmrtd = ['{GOOD}']\nrtmr1 = 'any'\nrtmr2 = 'any'\n")
    policy = Policy.from_toml(path)
    assert policy == tdx()
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert policy.tdx == TdxPolicy({**ANY_TDX, "mrtd": frozenset({bytes.fromhex(GOOD)})})


# What a policy that says too little has to add, by the sections of such policies.
TOO_LAX = {
    "no line of TDX": ("[cpu.tdx]", {"mrtd", "rtmr1", "rtmr2"}),
    "TDX by only its firmware": (f"[cpu.tdx]\nmrtd = ['{GOOD}']", {"rtmr1", "rtmr2"}),
    "TDX without its command line": (f"[cpu.tdx]\nmrtd = 'any'\nrtmr1 = ['{'61' * 48}']", {"rtmr2"}),
    "no line of SNP": ("[cpu.snp]", {"measurement", "min_tcb"}),
    "SNP on any platform": (f"[cpu.snp]\nmeasurement = ['{GOOD}']", {"min_tcb"}),
    "SNP with any software": ("[cpu.snp]\nmin_tcb = { snp = 8 }", {"measurement"}),
}


@each("name", TOO_LAX)
def test_a_policy_that_is_too_lax_is_refused_with_the_lines_to_add(name):
    section, absent = TOO_LAX[name]
    with pytest.raises(FormatError) as raised:
        Policy.from_toml(f"version = 1\n{section}\n")
    lines = re.findall("`(.+?)`", str(raised.value))
    assert section.splitlines()[0] in str(raised.value)
    assert {line.split(" = ")[0] for line in lines} == absent
    added = "\n".join(lines)
    policy = Policy.from_toml(f"version = 1\n{section}\n{added}\n")
    policy.check_cpu(quote() if policy.tdx else report(crl=amd.amd("Milan").ark.crl()), now=NOW)


@pytest.mark.parametrize("wrong", ["rtrm1", "RTMR1", "rtmr_1"])
def test_a_key_that_is_misspelt_is_named_before_a_line_is_to_be_added(wrong):
    with pytest.raises(
        FormatError, match=f"expected cpu.tdx.rtmr1, got the similar cpu.tdx.{wrong}. Correct it"
    ) as told:
        attest.Policy.from_toml(f"version = 1\n[cpu.tdx]\nmrtd = 'any'\n{wrong} = 'any'\nrtmr2 = 'any'\n")
    assert "Add to" not in str(told.value)


def test_a_policy_of_a_program_names_the_same():
    for measurements in ({}, {"mrtd": None}, {"mrtd": None, "rtmr1": None}):
        with pytest.raises(ValueError, match="rtmr2"):
            TdxPolicy(measurements)
    with pytest.raises(ValueError, match="measurement"):
        SnpPolicy({}, {})


@pytest.mark.parametrize("content", [b"\xff", b"#" * (1 << 20 | 1)])
def test_a_file_that_is_no_text_or_too_long_is_refused(tmp_path, content):
    path = tmp_path / "policy.toml"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"policy\.toml"):
        Policy.from_toml(path)


@each(
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
        ("[cpu.tdx]\nmrtd = []", "not empty"),
        ("[cpu.tdx]\nmrtd = 'all'", "mrtd"),
        ("[cpu.tdx]\nmrtd = ['22']", "48 bytes"),
        ("[cpu.tdx]\nmrtd = [22]", "48 bytes"),
        (f"[cpu.tdx]\nmrtd = ['{'zz' * 48}']", "48 bytes"),
        ("[cpu.tdx]\nmrtd = 'any'\nmrdt = []", "cpu.tdx.mrdt"),
        ("[cpu.tdx]\nmrtd = 'any'\ntcb_status = ['Fine']", "UpToDate, SWHardeningNeeded"),
        ("[cpu.tdx]\nmrtd = 'any'\ntcb_status = 'UpToDate'", "a list"),
        ("[cpu.tdx]\nmrtd = 'any'\nallow_debug = 1", "true or false"),
        ("[cpu.tdx]\nmrtd = 'any'\nallow_debug = 'false'", "true or false"),
        ("[cpu.tdx]\nmrtd = 'any'\nmin_evaluation_number = -1", "an integer from 0"),
        ("[cpu.tdx]\nmrtd = 'any'\nmax_collateral_age_days = 99999", "36500"),
        ("[cpu.tdx]\nmrtd = 'any'\nmax_collateral_age_days = 1.5", "an integer"),
        ("[cpu.snp]\nmeasurement = 'any'\nrevocation = 'maybe'", "required, cached, none"),
        ("[cpu.snp]\nmeasurement = 'any'\nmin_tcb = { ucode = 1 }", "cpu.snp.min_tcb.ucode"),
        ("[cpu.snp]\nmeasurement = 'any'\nproducts = ['Rome']", "Milan, Genoa, Turin"),
        ("[cpu.snp]\nmeasurement = 'any'\nchip_id = []", "cpu.snp.chip_id"),
        ("[cpu.snp]\nmeasurement = 'any'\nchip_ids = ['masked']", "64 bytes"),
        ("[cpu.snp]\nmeasurement = 'any'\nsigning_key = 'ASK'", "VCEK or VLEK as cpu.snp.signing_key, got 'ASK'"),
        ("[cpu.snp]\nmeasurement = 'any'\nsigning_key = ['VCEK']", "a string as cpu.snp.signing_key"),
        ("[cpu.snp]\nmeasurement = 'any'\nproviders = []", "cpu.snp.providers"),
        ("[cpu.snp]\nmeasurement = 'any'\nproviders = 'Cloud'", "a list of strings as cpu.snp.providers"),
        ("[cpu.snp]\nmeasurement = 'any'\nmin_tcb = {}", "cpu.snp.min_tcb, got none of them"),
        ("[cpu.snp]\nmeasurement = 'any'\nmin_tcb = 'all'", "a table as cpu.snp.min_tcb"),
        ("[cpu.tdx]\nmrtd = 'any'\ntd_attributes = ['00']", "8 bytes"),
        ("[cpu.tdx]\nmrtd = 'any'\nxfam = [231]", "8 bytes"),
    ],
)
def test_a_mistake_in_a_policy_is_named(text, said):
    section, *lines = text.split("\n")
    if section in {"[cpu.tdx]", "[cpu.snp]"}:
        needed = ("rtmr1", "rtmr2") if section == "[cpu.tdx]" else ("min_tcb",)
        text = "\n".join(["version = 1", section, with_lines(dict.fromkeys(needed, "'any'"), "\n".join(lines))])
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


def test_all_mismatches_are_found_and_none_where_a_policy_accepts():
    machine = Machine("tdx", 2)
    challenge = attest.Challenge.generate(now=NOW)
    offer = attest.make_offer(challenge, machine).offer
    found = attest.verify_offer(offer, challenge, attest.Policy.from_toml(machine_policy(2)), now=NOW, roots=roots())
    assert attest.Policy.from_toml(machine_policy(2)).find_mismatches(found.cpu, found.devices, now=NOW) == ()
    text = machine_policy(2).replace("61" * 48, "62" * 48).replace("count = 2", "count = 3")
    text = text.replace("min_driver = '550'", "min_driver = '999'")
    judge = attest.Policy.from_toml(text)
    errors = judge.find_mismatches(found.cpu, found.devices, now=NOW)
    names = [(error.evidence, error.field) for error in errors]
    assert names == [
        ("TDX quote", "RTMR1"),
        ("GPU evidence", "number of GPUs"),
        ("GPU 0 report", "driver version"),
        ("GPU 1 report", "driver version"),
    ]
    with pytest.raises(AttestationError, match="RTMR1"):
        judge.check_cpu(found.cpu, now=NOW)
    (absent, gpus) = attest.Policy().find_mismatches(found.cpu, found.devices, now=NOW)
    assert (absent.field, gpus.field) == ("kind", "kind")
