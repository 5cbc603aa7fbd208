"""Seal as a folder, and mount, each file that the tests open, and open it there by safetensors' own names."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import safetensors.torch

import fastrack

KEY = fastrack.Key.generate()
MOUNTS = contextlib.ExitStack()  # for as long as the process lives


def mounted(path):
    if not str(path).endswith(".safetensors") or not Path(path).is_file():
        return path
    place = Path(tempfile.mkdtemp())
    (place / "model").mkdir()
    shutil.copy(path, place / "model/model.safetensors")
    fastrack.seal_folder(place / "model", place / "sealed", KEY)
    return f"{MOUNTS.enter_context(fastrack.mount_folder(place / 'sealed', keys=KEY))}/model.safetensors"


def of_mounted(function):
    return lambda path, *arguments, **options: function(mounted(path), *arguments, **options)


# A first mount puts fastrack's functions in the place of safetensors', which the tests are then to find.
first = Path(tempfile.mkdtemp(), "first.safetensors")
safetensors.numpy.save_file({"x": np.ones(2)}, first)
mounted(first)
safetensors.safe_open = of_mounted(safetensors.safe_open)
for module in (safetensors.torch, safetensors.numpy):
    module.load_file = of_mounted(module.load_file)
