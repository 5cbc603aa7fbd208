"""Run type checkers on code that uses the package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastrack

ROOT = Path(fastrack.__file__).parents[1]
CHECKERS = {"mypy": ["--strict", "--no-incremental"], "pyright": ["--pythonpath", sys.executable]}

pytestmark = pytest.mark.slow


MORE = """
from torch.utils.data import Dataset, DistributedSampler, StackDataset, Subset

kept: Dataset[dict[str, object]] = data
every = [DistributedSampler(data), Subset(data, [1]), StackDataset(x=data)]
iter(fastrack.wrap([1])).close()
"""


@pytest.fixture(scope="module", params=["pyright", pytest.param("mypy", marks=pytest.mark.nightly)])
def errors(request, tmp_path_factory):
    """Errors by file, of one run, as most of its time goes into torch's types."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 2
    folder = tmp_path_factory.mktemp("types")
    (folder / "readme.py").write_text("".join(blocks) + MORE)
    (folder / "typo.py").write_text("import fastrack\n\nx = fastrack.nonexistent\nfastrack.save_flie\n")
    command = [sys.executable, "-m", request.param, *CHECKERS[request.param], *map(str, sorted(folder.iterdir()))]
    # Errors of these files alone: the package is checked by `make check`, with settings of its own.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if re.search(rf"{name}.py:\d+.*error:", line)] for name in ("readme", "typo")}


def test_the_code_of_the_readme_is_well_typed(errors):
    assert errors["readme"] == []


def test_a_misspelt_name_is_an_error(errors):
    assert any("nonexistent" in line for line in errors["typo"])
    assert any("save_flie" in line for line in errors["typo"])
