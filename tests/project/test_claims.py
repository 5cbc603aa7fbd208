"""Claims that something is missing, in the documentation: each stands here with the reason for which it holds."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *(ROOT / "kernels").glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
]
CLAIM = re.compile(
    r"\byet\b|not supported|does not support|unsupported|untested|untried|attests? nothing|external audit"
    r"|\b(?:local|symmetric|files|Linux|paths) (?:\w+ )?(?:only|alone)\b",
    re.IGNORECASE,
)

# Words of a page around a claim, by the reason why it holds.
HELD = {
    "bench/results has no figure of a GPU": {
        "README.md": ["has not yet run on a GPU", "[not yet measured](docs/gpu.md#not-yet-measured)"],
        "docs/benchmarks.md": [
            "Nothing on a GPU has been measured yet",
            "**Not yet measured**: any of it",
            "**Not yet measured**: all of it",
            "(gpu.md#not-yet-measured)",
        ],
        "docs/collectives.md": ["**Not yet run on a GPU, not yet measured.**"],
        "docs/offload.md": ["None of it has run on a GPU yet"],
        "docs/dev/benchmarking.md": [
            "How long a stage takes on a GPU is **not yet measured**",
            'Pages that say "not yet measured" change',
        ],
        "docs/dev/testing.md": ["**A GPU: not yet measured.**"],
        "docs/gpu.md": [
            "**Not yet run on a GPU.**",
            "(counted; not yet measured)",
            "No results of a GPU are in the repository yet",
            "Which kind wins is **not yet measured**",
            "which drivers do is not yet measured",
            "None of the last three has been tried on a GPU yet",
            "## Not yet measured",
        ],
        "docs/how-it-works.md": ["(gpu.md#not-yet-measured)"],
        "docs/serving.md": ["that has **not yet run on a GPU**"],
        "docs/serving-reference.md": ["On a GPU the connector has **not yet run**"],
        "kernels/DESIGN.md": ["No figure on this page was measured on a GPU yet"],
    },
    "bench/results has no figure of an Arm CPU": {
        "docs/benchmarks.md": ["`armv8` is **not yet measured**"],
        "docs/how-it-works.md": ["The speed of `armv8` is **not yet measured**"],
    },
    "the project has no confidential machine": {
        "docs/attestation.md": ["**Not yet run on a confidential machine.**"],
        "docs/serving.md": ["**The server has not yet run on a confidential machine.**"],
        "docs/tour.md": ["**Not yet run on a confidential machine.**"],
    },
    "no auditor from outside the project has read the code": {
        "README.md": ["it has had no external audit"],
        "docs/attestation.md": ["It has had no external audit"],
        "docs/threat-model.md": ["fastrack, which has had no external audit"],
        "docs/tour.md": ["It has had no external audit"],
    },
    "no version was released: the repository has no tag": {
        "docs/dev/releasing.md": ["No version has been released yet"],
    },
    "that takes a machine of the kind, which the project has not": {
        "docs/quickstart.md": ["**macOS**: untested", "Windows itself is not supported"],
        "docs/remote.md": ["so its condition is sent, but untried"],
        "docs/threat-model.md": ["**This is untested.**"],
    },
    "it is so by design, and a test of the feature says it": {
        "docs/attestation.md": ["## Not supported: Azure's paravisor"],
        "docs/gpu.md": ["A transfer attests nothing by itself"],
        "docs/models.md": ["DeepSpeed ZeRO-3 is not supported"],
        "docs/remote.md": ["`anchor=` takes local files only"],
        "docs/threat-model.md": ["Sealing and transfers attest nothing"],
    },
    "it speaks of a moment, not of a version": {
        "README.md": ["you do not need it yet if"],
        "docs/dev/decisions.md": ["bytes that are not authenticated yet", "a module sharded later has no hook yet"],
        "docs/how-it-works.md": ["bytes that are not authenticated yet"],
        "docs/manifests.md": ["model.anchor: no manifest yet"],
        "docs/threat-model.md": ["whose verdict is not known yet"],
    },
}

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not (ROOT / "docs").exists(), reason="the tests run without the documentation"),
]


def claims_of(text):
    """Return each claim with some words before and after it, and where it stands."""
    text = " ".join(re.sub(r"^> ?", "", text, flags=re.MULTILINE).split())
    return text, [
        (match.start(), text[max(0, match.start() - 60) : match.end() + 40]) for match in CLAIM.finditer(text)
    ]


def unexplained(name, text):
    """Return the claims of a page that no entry covers, and the entries that cover none."""
    text, claims = claims_of(text)
    entries = [words for held in HELD.values() for words in held.get(name, ())]
    spans = {words: [(at.start(), at.end()) for at in re.finditer(re.escape(words), text)] for words in entries}
    covered = lambda place: any(start <= place < end for found in spans.values() for start, end in found)  # noqa: E731
    return [said for place, said in claims if not covered(place)] + [
        words for words, found in spans.items() if not found
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_is_said_to_be_missing_stands_here_with_its_reason(path):
    name = path.relative_to(ROOT).as_posix()
    assert unexplained(name, path.read_text(encoding="utf-8")) == []


def test_no_reason_is_that_of_a_page_that_is_not_there():
    assert [name for held in HELD.values() for name in held if not (ROOT / name).exists()] == []


def test_nothing_was_measured_that_is_said_not_to_be():
    names = [path.name for path in (ROOT / "bench/results").glob("*.json")]
    assert [name for name in names if "-gpu-" in name or "armv8" in name or "graviton" in name] == []


def test_a_new_claim_is_noticed():
    assert unexplained("docs/keys.md", "It reads local files only.") == ["It reads local files only."]
    assert unexplained("docs/keys.md", "Not yet supported.") == ["Not yet supported."]
