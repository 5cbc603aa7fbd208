"""What a type checker says of code that uses the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastrack

ROOT = Path(fastrack.__file__).parents[1]
CHECKERS = {"mypy": ["--strict", "--no-incremental"], "pyright": ["--pythonpath", sys.executable]}

pytestmark = pytest.mark.slow


def check(checker, path, text):
    path.write_text(text)
    command = [sys.executable, "-m", checker, *CHECKERS[checker], str(path)]
    # Errors of the file alone: this package is checked by `make check`, with the settings of its own.
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode in {0, 1}, found.stdout + found.stderr
    return [line for line in found.stdout.splitlines() if re.search(rf"{path.name}:\d+.*error:", line)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", CHECKERS)
def test_the_code_of_the_readme_is_well_typed(tmp_path, checker):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 2
    more = """
from torch.utils.data import Dataset, DistributedSampler, StackDataset, Subset

kept: Dataset[dict[str, object]] = data
every = [DistributedSampler(data), Subset(data, [1]), StackDataset(x=data)]
"""
    assert check(checker, tmp_path / "readme.py", "".join(blocks) + more) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_misspelt_name_is_an_error(tmp_path, checker):
    errors = check(checker, tmp_path / "typo.py", "import fastrack\n\nx = fastrack.nonexistent\nfastrack.save_flie\n")
    assert any("nonexistent" in line for line in errors)
    assert any("save_flie" in line for line in errors)
