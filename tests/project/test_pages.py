"""Every block of every page runs as printed and prints what is printed, or says why it cannot."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import pages
from helpers.pages import blocks_of, lines_of, side_of

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("examples/*.md")]
    if "_build" not in path.parts
}
RUN = {name: found for name, page in PAGES.items() if (found := [each for each in blocks_of(page) if not each.reason])}

# Of these pages the blocks run without torch too, but for the ones that import it.
WITHOUT_TORCH = [
    "README.md",
    *(f"docs/{name}.md" for name in ("attestation", "keys", "manifests", "models", "quickstart")),
]

NOT_RUN = {
    "README.md": {"installs packages": 1},
    "CONTRIBUTING.md": {"takes minutes": 1},
    "docs/api-ray.md": {"needs Ray": 1},
    "docs/attestation.md": {
        "needs a confidential machine": 5,
        "needs sev-snp-measure and a firmware": 1,
        "serves until it is asked to end": 1,
    },
    "docs/benchmarks.md": {"takes minutes": 1, "needs a profile": 1},
    "docs/collectives.md": {"needs several ranks": 2, "waits for an owner": 1},
    "docs/data.md": {"needs torchvision": 1, "needs timm": 1},
    "docs/dev/benchmarking.md": {
        "takes minutes": 2,
        "needs a GPU": 1,
        "needs results of a GPU": 1,
        "asks the package index": 1,
    },
    "docs/distributed.md": {
        "starts machines": 1,
        "needs Lightning and Transformers": 1,
        "needs several processes": 1,
    },
    "docs/dev/releasing.md": {"needs a release": 2},
    "docs/dev/testing.md": {"takes minutes": 4},
    "docs/gpu.md": {"installs packages": 1, "needs a GPU": 3},
    "docs/keys.md": {
        "needs a terminal": 1,
        "needs a vault": 1,
        "needs a KBS, a guest of Confidential Containers and its hub": 1,
    },
    "docs/leases.md": {"serves until it is asked to end": 1, "needs the log of a broker": 1},
    "docs/models.md": {"needs transformers": 2, "needs diffusers": 1, "needs compressed-tensors": 2},
    "docs/offload.md": {"needs accelerate": 1, "needs transformers": 1},
    "docs/protect.md": {"needs Accelerate": 1, "needs transformers": 1},
    "docs/remote.md": {"needs a server": 1},
    "docs/serving.md": {
        "needs vLLM": 3,
        "serves until it is asked to end": 1,
        "starts a server": 2,
        "needs the server": 1,
        "needs a server": 1,
        "needs transformers": 1,
    },
    "docs/serving-reference.md": {"starts a server": 1, "needs the server": 1},
    "docs/tour.md": {"serves until it is asked to end": 1, "needs a confidential machine": 1},
    "docs/tour-reference.md": {"needs NVFlare": 1, "a holder's own files": 1},
    "docs/training.md": {"needs Lightning": 1},
}

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="the tests run without the documentation")


def run_page(name, folder, *, with_torch=True):
    """Return the blocks of which the page says what they print, each with what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTRACK_")}
    command = [sys.executable, "-W", "error", pages.__file__]
    given = json.dumps([RUN[name], with_torch])
    done = subprocess.run(command, cwd=folder, env=kept, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [(RUN[name][place], text) for place, text in json.loads(done.stdout)]
    return [(block, text) for block, text in said if block.printed]


def differing(said):
    return [text for block, text in said if lines_of(block.printed) != lines_of(text)]


def accept(name, said):
    """Write what the blocks printed into the page."""
    page = PAGES[name]
    for block, text in said:
        shown = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
        page = page.replace(f"```text\n{block.printed}```", f"```text\n{shown}\n```")
    (ROOT / name).write_text(page, encoding="utf-8")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "README.md")) for name in RUN])
def test_the_blocks_of_a_page_run_and_print_what_it_says(name, tmp_path, request):
    if name == "docs/data.md" and sys.version_info >= (3, 14):
        pytest.skip("workers that are not forked import no function of a page")
    imported = {
        found for block in RUN[name] for found in re.findall(r"^(?:import|from) (\w+)", block.text, re.MULTILINE)
    }
    missing = {found for found in imported if importlib.util.find_spec(found) is None}
    if missing - ({"torch"} if name in WITHOUT_TORCH else set()):
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    said = run_page(name, tmp_path, with_torch="torch" not in missing)
    if request.config.getoption("--accept-messages") and differing(said):
        accept(name, said)
    else:
        assert differing(said) == [], "run with --accept-messages, and read the diff"


@pytest.mark.nightly
@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_blocks_of_a_page_run_without_torch(name, tmp_path):
    assert differing(run_page(name, tmp_path, with_torch=False)) == []


def test_the_loop_that_a_diff_changes_prints_the_same_before_the_change(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    pandas = pytest.importorskip("pandas")
    page = PAGES["README.md"]
    ((diff, printed),) = re.findall(r"(?ms)^```diff\n(.*?)^```\n\n```text\n(.*?)^```", page)
    (table,) = re.findall(r"(?ms)^cat > flowers.csv <<END\n(.*?)^END$", page)
    monkeypatch.chdir(tmp_path)
    Path("flowers.csv").write_text(table)
    exec(side_of(diff, "-"), {"pandas": pandas})
    assert lines_of(capsys.readouterr().out) == lines_of(printed)


def test_what_is_not_run_is_listed_here_with_its_reasons():
    reasons = {
        name: dict(Counter(each.reason for each in blocks_of(page) if each.reason)) for name, page in PAGES.items()
    }
    assert {name: found for name, found in reasons.items() if found} == NOT_RUN


def test_blocks_are_of_the_languages_that_are_run_and_have_no_prompts():
    known = {"python", "sh", "text", "toml", "ini", "dockerfile", "json", "rego", "diff"}
    for name, page in PAGES.items():
        assert set(re.findall(r"^ *```(\w+)$", page, re.MULTILINE)) <= known, name
        assert [line for each in blocks_of(page) for line in each.text.splitlines() if line.startswith("$ ")] == [], (
            name
        )


def test_an_output_is_what_follows_its_block_at_once():
    page = "```python\nx\n```\n\n```text\n1\n```\n\n```sh\ny\n```\n\nand\n\n```text\n2\n```\n"
    assert [block.printed for block in blocks_of(page)] == ["1\n", None]


def test_times_and_ids_of_an_output_may_vary_and_nothing_else():
    assert lines_of("12 files in 3.5 s,  1.2 GB/s: 0123456789abcdef") == lines_of(
        "12 files in 4 s, 9 GB/s: ffff456789abcdef"
    )
    assert lines_of("12 files") != lines_of("13 files")
