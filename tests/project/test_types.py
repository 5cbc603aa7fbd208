"""Run type checkers on code that uses the package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.pages import blocks_of

import fastrack

ROOT = Path(fastrack.__file__).parents[1]
CHECKERS = {
    "mypy": ["--strict", "--no-incremental", "--untyped-calls-exclude=torch"],
    "pyright": ["--pythonpath", sys.executable],
}

pytestmark = pytest.mark.repository


MORE = """
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, DistributedSampler, StackDataset, Subset

kept: Dataset[dict[str, object]] = data
every = [DistributedSampler(data), Subset(data, [1]), StackDataset(x=data)]
iter(fastrack.wrap([1])).close()


def seal_ones(key: fastrack.KeyLike) -> fastrack.SealedTensor:
    return fastrack.seal(np.ones(3), key, name="ones")


def total(sample: dict[str, Any]) -> torch.Tensor:
    return sum(sample.values(), torch.zeros(3))


totals = fastrack.SealedDataset("train.safetensors", transform=total)
texts = fastrack.SealedDataset.records("texts.safetensors")
assert_type(fastrack.SealedDataset("train.safetensors")[0], dict[str, Any])
assert_type(texts.windows("text", 8)[np.int64(0)], dict[str, Any])
assert_type(totals[0], torch.Tensor)
assert_type(fastrack.SealedDataset.records("texts.safetensors", transform=total)[0], torch.Tensor)
bare: fastrack.SealedDataset = texts

ones = seal_ones(key)
assert_type(fastrack.to_device(ones, "cuda", keys=key), torch.Tensor)
assert_type(fastrack.to_device(ones[1:], keys=key, framework="torch"), torch.Tensor)
assert_type(fastrack.to_device(ones, keys=key, framework="numpy"), npt.NDArray[Any])
assert_type(fastrack.to_device(torch.ones(3)), torch.Tensor)
assert_type(fastrack.to_device(np.ones(3), framework="numpy"), npt.NDArray[Any])
assert_type(ones.to("cuda", keys=key), torch.Tensor)
assert_type(ones[1:].to(framework="numpy"), npt.NDArray[Any])
assert_type(fastrack.Channel("cpu").to_device(ones, keys=key), torch.Tensor)
assert_type(fastrack.unseal(ones, key), torch.Tensor)
assert_type(fastrack.unseal(ones[1:], keys=key, framework="numpy"), npt.NDArray[Any])
assert_type(fastrack.load_tensors("train.safetensors", keys=key), dict[str, torch.Tensor])
assert_type(fastrack.load_tensors("train.safetensors", keys=key, framework="np"), dict[str, npt.NDArray[Any]])
are_floats: bool = ones.dtype == torch.float32 or ones.dtype == np.float32
sources: list[fastrack.KeySource] = [key, [key, "owner.key"], {key.id: key}]
collectives = fastrack.distributed.init_process_group, fastrack.grants.Grants, fastrack.attest.Policy
filled = {"ones": torch.zeros(3)}
assert_type(fastrack.to_device({"ones": ones}, keys=key, out=filled), dict[str, torch.Tensor])
"""


WRONG = """
def sealed(tensor: fastrack.SealedTensor, data: fastrack.SealedDataset) -> None:
    fastrack.to_device(tensor).tolisst()
    data[0].columns
    tensor.to().tolisst_()
    fastrack.to_device(tensor, "cpu", nonblocking=True)
    fastrack.load_tensors("train.safetensors", key=None)
    fastrack.distributed.nothing
"""


@pytest.fixture(scope="module", params=["pyright", pytest.param("mypy", marks=pytest.mark.nightly)])
def errors(request, tmp_path_factory):
    """Errors by file, of one run, as most of its time goes into torch's types."""
    blocks = [block.text for block in blocks_of((ROOT / "README.md").read_text()) if block.language == "python"]
    assert len(blocks) > 2
    folder = tmp_path_factory.mktemp("types")
    (folder / "readme.py").write_text("".join(blocks) + MORE)
    (folder / "typo.py").write_text("import fastrack\n\nx = fastrack.nonexistent\nfastrack.save_flie\n" + WRONG)
    command = [sys.executable, "-m", request.param, *CHECKERS[request.param], *map(str, sorted(folder.iterdir()))]
    # Only errors of these files: the package is checked by `make check`, with settings of its own.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if re.search(rf"{name}.py:\d+.*error:", line)] for name in ("readme", "typo")}


def test_the_code_of_the_readme_is_well_typed(errors):
    assert errors["readme"] == []


def test_a_misspelt_name_is_an_error(errors):
    assert any("nonexistent" in line for line in errors["typo"])
    assert any("save_flie" in line for line in errors["typo"])


def test_a_misspelt_attribute_of_a_result_is_an_error(errors):
    for name in ("tolisst", "columns", "tolisst_", "nothing"):
        assert any(name in line for line in errors["typo"])
