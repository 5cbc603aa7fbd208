"""`python -m bench.release` joins the results of two commands into one document."""

import json
from pathlib import Path

import pytest

from bench import release


def test_the_figures_of_a_release_are_one_document(tmp_path, monkeypatch):
    rows = [{"size": size, "path": "direct"} for size in (16, 64)]
    results = {"bench": {"ablation": [1], "machine": {}}, "bench.targets": {"rows": rows, "promised": [2], "bits": 256}}
    seen = []

    def run(command, *, check):
        name = command[command.index("--json") - 1]
        seen.append((name, check, [*map(str, command[command.index("--json") + 2 :])]))
        Path(command[command.index("--json") + 1]).write_text(json.dumps(results[name]))

    monkeypatch.setattr(release.subprocess, "run", run)
    release.main([str(tmp_path / "out.json"), "--picture", "steps.png"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == {"ablation": [1], "machine": {}, "paths": rows[1:], "promised": [2]}
    with pytest.raises(SystemExit):
        release.main([str(tmp_path / "out.json")])
    assert len(seen) == 2
    # A target that is missed is a result, and no failure.
    assert seen == [("bench", True, ["--picture", "steps.png"]), ("bench.targets", False, [])]
