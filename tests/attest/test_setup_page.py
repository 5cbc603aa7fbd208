"""The page on attestation names every key of a policy, and every service."""

import re
from pathlib import Path

import pytest

from fastrack import FormatError, attest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("attestation.md", "_policy-keys.md"))
REGISTERS = (
    "mrtd",
    "rtmr0",
    "rtmr1",
    "rtmr2",
    "rtmr3",
    "mrseam",
    "mrconfigid",
    "mrowner",
    "mrownerconfig",
    "mrservicetd",
)
VALUES = ("measurement", "min_tcb", "host_data", "family_id", "image_id", "id_key_digest", "author_key_digest")
LINES = {
    "cpu.tdx": "".join(f"{name} = 'any'\n" for name in REGISTERS),
    "cpu.snp": "".join(f"{name} = 'any'\n" for name in VALUES),
    "gpu": "",
}


@pytest.mark.parametrize("section", LINES)
def test_the_page_has_the_keys_of_each_section_and_no_others(section):
    with pytest.raises(FormatError) as caught:
        attest.Policy.from_toml(f"version = 1\n[{section}]\n{LINES[section]}zzz = 1")
    known = set(re.search(r"one of the keys (.*) as", str(caught.value))[1].split(", "))
    table = PAGE.partition(f"### `[{section}]`")[2].partition("###")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == known


@pytest.mark.parametrize(
    "name", ["cpu.tdx.mrtd", "cpu.tdx.rtmr1", "cpu.tdx.rtmr2", "cpu.snp.measurement", "cpu.snp.min_tcb"]
)
def test_no_other_key_of_a_section_is_taken_for_a_missing_one(name):
    section, _, key = name.rpartition(".")
    table = PAGE.partition(f"### `[{section}]`")[2].partition("###")[0]
    rows = "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `"))
    lines = "".join(f"{other} = 'any'\n" for other in re.findall(r"`(\w+)`", rows) if other not in {key, "events"})
    with pytest.raises(FormatError, match=f"expected {name}, got none"):
        attest.Policy.from_toml(f"version = 1\n[{section}]\n{lines}")


def test_the_page_has_the_addresses_that_are_asked():
    services = attest.CollateralServices()
    for name in ("intel", "intel_roots", "amd", "nvidia_rim", "nvidia_ocsp"):
        row = next(row for row in PAGE.splitlines() if f"`--{name.replace('_', '-')}`)" in row)
        assert f"`{getattr(services, name)}`" in row


def test_its_examples_of_measurements_and_events_are_a_policy():
    events, gpu = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    policy = attest.Policy.from_toml(f"version = 1\n[cpu.tdx]\nmrtd = 'any'\nrtmr1 = 'any'\n{events}\n{gpu}")
    assert (len(policy.tdx.events["rtmr2"]), len(policy.gpu.measurements)) == (2, 1)
