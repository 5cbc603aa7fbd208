"""Where the CUDA sources are looked for."""

from __future__ import annotations

import pytest

from fastrack._devices.cuda import nvrtc
from fastrack.errors import DeviceError


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder with a package without kernels, and beside it a folder `kernels` that holds some."""
    (tmp_path / "fastrack").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/fastrack.cu").write_text("#define FASTRACK_THREADS 512\n")
    monkeypatch.setattr(nvrtc, "files", lambda name: tmp_path / name)
    return tmp_path


@pytest.mark.usefixtures("installed")
def test_another_package_of_that_name_is_not_taken_for_the_kernels():
    with pytest.raises(DeviceError, match="install fastrack again"):
        nvrtc.find_kernels()


def test_a_checkout_has_them_beside_the_package(installed):
    (installed / "pyproject.toml").touch()
    assert nvrtc.find_kernels().folder == installed / "kernels"
