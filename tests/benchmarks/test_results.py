"""The results in bench/results: each is what the schema says, is named as it must be, and tells nothing of its host."""

import functools
import json
import re
from pathlib import Path

import fastjsonschema
import pytest

from bench.gpu import decide
from bench.gpu.stages import STAGES

FOLDER = Path(__file__).parents[2] / "bench/results"
SCHEMA = json.loads((FOLDER / "schema.json").read_text()) if FOLDER.is_dir() else {}
KINDS = ("bench", "chunks", "collectives", "fuzz", "peers", "plan", "revocations", "soak", "visits", "workloads")
KINDS += tuple(f"gpu-{stage}" for stage in STAGES)
NAME = re.compile(rf"\d{{4}}-\d\d-\d\d-(?:({'|'.join(KINDS)})-)?[a-z0-9]+(?:-[a-z0-9]+)*-\d+cores\.json")
FILES = sorted(path for path in FOLDER.glob("*.json") if path.name != "schema.json")
# Folders of a file system, networks and people. Words such as "GB/s" and "1/4" are none.
HOST = re.compile(
    r"(?<![\w.+/:-])~?/\w[\w.+-]*/|\b[\w-]+\.(?:local|internal|lan|corp)\b|\b\d+\.\d+\.\d+\.\d+\b|\w@\w+\.\w"
)

pytestmark = pytest.mark.skipif(not FILES, reason="the tests run without the results")


@functools.cache
def validator(kind):
    return fastjsonschema.compile({**SCHEMA, "anyOf": [{"$ref": f"#/definitions/{kind}"}]})


def kind_of(path):
    return (NAME.fullmatch(path.name)[1] or "paths").partition("-")[0]


def strings(value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_a_result_is_what_the_schema_says_and_tells_nothing_of_its_host():
    for path in FILES:
        assert NAME.fullmatch(path.name), f"{path.name}: expected DATE-KIND-MACHINE-Ncores.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        validator(kind_of(path))(document)
        if kind_of(path) == "gpu":
            assert path.name.startswith(f"{document['date'][:10]}-gpu-{document['stage']}-")
        document.get("machine", document).pop("software", None)  # versions may look like addresses
        assert [text for text in strings(document) if HOST.search(text)] == [], path.name


def test_nothing_else_lies_there():
    known = {path.name for path in FILES} | {"schema.json", decide.FILE, "cubins"}
    others = {path.name for path in FOLDER.iterdir()} - known
    assert others <= {path.with_suffix(suffix).name for path in FILES for suffix in (".png", ".ncu-rep", ".csv")}


TELLING = ["/home/a/b.json", "FormatError: /tmp/x/y is", "~/x/y", "node7.internal", "10.0.0.17", "someone@example.org"]
HARMLESS = ["GB/s", "share 1/4", "tests/gpu/x", "https://docs.example.org/a/b", "3.11.7"]
HARMLESS += ["to_device(sealed) / bounce path, 256 MiB"]


def test_only_what_tells_of_a_host_is_found():
    assert [text for text in (*TELLING, *HARMLESS) if HOST.search(text)] == TELLING
