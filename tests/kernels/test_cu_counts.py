"""Counts of what kernels take for a chunk: a change of over 2 % waits for `python -m bench.gpu.bound --accept`."""

import functools
import json
import lzma
import re

import pytest

from bench import chunk_sizes
from bench.gpu import bound, counts, sass
from fastrack._devices.cuda.nvrtc import CUBINS, find_kernels

AGREED = counts.read()
ACCEPT = "look at the changes, then run `python -m bench.gpu.bound --accept --write`"


@pytest.fixture(scope="module")
def compiled():
    """Compiles the kernels for an architecture with the NVRTC of the agreed counts."""
    if counts.compiler() != AGREED["nvrtc"]:
        pytest.skip(f"the counts are of NVRTC {AGREED['nvrtc']}, not {counts.compiler()}")
    return functools.cache(counts.compile_for)


def changes(measure, found):
    agreed = {name: each for name, each in AGREED[measure].items() if name in found}
    return [*counts.changes(agreed, found)]


@pytest.mark.nightly  # by day machine code is counted
@pytest.mark.parametrize("kernel", counts.COUNTED)
def test_what_interpreted_kernels_do_for_a_chunk_was_agreed_on(compiled, kernel):
    found = counts.interpret(compiled(counts.INTERPRETED)[1], [kernel])
    assert changes("ptx", found) == [], ACCEPT


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=[] if each in CUBINS else pytest.mark.nightly) for each in counts.ARCHITECTURES],
)
def test_the_machine_instructions_for_16_bytes_were_agreed_on(compiled, architecture):
    """They are of what the build has compiled, or compiled here, a quarter of a minute each, if that is not there."""
    if not sass.find_disassembler():
        pytest.skip("there is no nvdisasm to read machine code")
    made = find_kernels().image(architecture)
    cubin = lzma.decompress(made.read_bytes()) if made.exists() else compiled(architecture)[0]
    assert changes("sass", counts.count_machine_code(architecture, cubin)) == [], ACCEPT


def test_the_counts_are_of_every_kernel_and_architecture():
    assert set(AGREED["ptx"]) == set(counts.COUNTED)
    assert set(AGREED["sass"]) == {f"{kernel} {name}" for kernel in counts.COUNTED for name in counts.ARCHITECTURES}


def test_what_was_agreed_on_is_fast():
    whole = {name: sum(part["all"] for part in parts.values()) for name, parts in AGREED["sass"].items()}
    assert whole["open_256 sm_90"] <= 820
    assert whole[f"open_256 {counts.HOLES}"] <= 1200
    for name, parts in AGREED["sass"].items():
        spilled = sum(part.get("local", 0) for part in parts.values())
        assert spilled == 0 or counts.HOLES in name, name
    for name, found in AGREED["ptx"].items():
        assert found["lookups"] == found["passes of lookups"], f"{name}: a bank serves two lanes"


def test_both_ways_of_counting_find_the_same_lookups():
    for kernel in ("open_128", "open_256", "seal_128", "seal_256"):
        read = sum(part.get("shared", 0) for part in AGREED["sass"][f"{kernel} {counts.INTERPRETED}"].values())
        assert AGREED["ptx"][kernel]["lookups"] / 32 == pytest.approx(read, rel=0.01), kernel


def test_a_change_within_two_percent_is_none_and_a_larger_or_a_new_one_is_told():
    agreed = {"open": {"alu": 100, "wide": 50}, "seal": {"alu": 100}}
    found = {"open": {"alu": 102, "wide": 52}, "gather": {"alu": 1}}
    expected = ["gather, alu: 0 before, 1 now", "open, wide: 50 before, 52 now", "seal, alu: 100 before, 0 now"]
    assert [*counts.changes(agreed, agreed)] == []
    assert [*counts.changes(agreed, found)] == expected


def test_the_tables_of_the_design_are_those_that_the_command_writes():
    text = bound.DESIGN.read_text(encoding="utf-8")
    assert text.count(bound.tables()) == 1, "run `python -m bench.gpu.bound --write`"


@pytest.mark.parametrize("kernel", counts.COUNTED)
@pytest.mark.parametrize("architecture", bound.USUAL)
def test_the_bound_is_printed_in_80_columns_and_the_least_is_the_lowest(capsys, kernel, architecture):
    arguments = ["--kernel", kernel, "--architecture", architecture]
    bound.main(arguments)
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 80
    bound.main([*arguments, "--json"])
    speeds = {row["resource"]: row["gbps"] for row in json.loads(capsys.readouterr().out)["modelled"]}
    apart, least = speeds.pop("phases never overlap"), speeds.pop("the least of these")
    assert least == [min(speed[end] for speed in speeds.values() if speed) for end in (0, 1)]
    assert apart[0] < least[0]
    ends = " to ".join(dict.fromkeys(f"{end:.0f}" for end in least))
    assert re.search(rf"the least of these .* {ends}$", "\n".join(printed), re.MULTILINE)


def test_a_gpu_without_published_figures_is_refused():
    with pytest.raises(SystemExit, match="modelling sm_120 failed: expected a GPU with published figures"):
        bound.main(["--architecture", "sm_120"])


def test_counting_needs_a_disassembler(monkeypatch):
    monkeypatch.setattr(sass, "find_disassembler", lambda: None)
    with pytest.raises(SystemExit, match="expected NVRTC and nvdisasm"):
        bound.main(["--accept"])


def test_the_format_has_the_line_that_copies_with_other_chunks_replace():
    text = (chunk_sizes.ROOT / "fastrack/format.py").read_text()
    assert text.count(chunk_sizes.LINE) == 1
