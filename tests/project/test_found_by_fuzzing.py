"""Test findings of `make fuzz` and `make soak`, each made as small as it can be."""

import bz2
import dataclasses
import errno
import io
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers.cases import each
from helpers.cuda_rig import within
from helpers.forking import in_forked_child

import fastrack
from fastrack import FormatError, Key
from fastrack._keys import recipients, wrapped

KEY = Key.from_bytes(bytes(range(32)))


def archive(compression=zipfile.ZIP_STORED, content=None):
    """An .npz file of one array."""
    one, whole = io.BytesIO(), io.BytesIO()
    np.save(one, np.arange(100))
    with zipfile.ZipFile(whole, "w", compression) as file:
        file.writestr("x.npy", content or one.getvalue())
    return bytearray(whole.getvalue())


def directory(data):
    """Return the offset of the array's entry in the archive's directory."""
    return data.index(b"PK\1\2")


def altered(place, value):
    """An archive with another byte in its directory."""
    data = archive()
    data[directory(data) + place] = value
    return data


def flagged(flag):
    """An archive with a flag of its entry set."""
    data = archive()
    for place in (6, directory(data) + 8):
        data[place] |= flag
    return data


def before_the_start():
    data = archive()
    end = data.index(b"PK\5\6")
    size = int.from_bytes(data[end + 12 : end + 16], "little")
    data[end + 12 : end + 16] = (size + 1 << 8).to_bytes(4, "little")
    return data


def headed(descr, shape):
    """An .npy file and an .npz file of only a header."""
    one = io.BytesIO()
    np.lib.format.write_array_header_1_0(one, {"descr": descr, "fortran_order": False, "shape": shape})
    return {"npy": one.getvalue(), "npz": archive(content=one.getvalue())}


def spoilt(compression, content):
    """An archive whose array is compressed in that way, or so it says."""
    data = archive(compression)
    start = data.index(content)
    data[start : start + 12] = b"\xff" * 12
    return data


@each(
    "data",
    [
        altered(10, 99),
        altered(6, 99),
        flagged(1),
        flagged(32),
        before_the_start(),
        headed("<f8", (10**13,))["npz"],  # an array of 80 TB
        spoilt(zipfile.ZIP_BZIP2, bz2.compress(b"")[:3]),
        spoilt(zipfile.ZIP_LZMA, b"\t\4\5\0]"),
    ],
    ids=["unknown compression", "later version", "encrypted", "patched", "before the start", "larger", "bz2", "lzma"],
)
def test_an_archive_that_zipfile_cannot_read_is_no_archive(tmp_path, data):
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(FormatError, match=r"x\.npz is not an \.npz file"):
        fastrack.seal_file(tmp_path / "x.npz", tmp_path / "sealed.safetensors", KEY)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_an_array_of_no_type_is_no_array(tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    path.write_bytes(headed((), ())[kind])
    with pytest.raises(FormatError, match=rf"x\.{kind} is not an \.{kind} file"):
        fastrack.seal_file(path, tmp_path / "sealed.safetensors", KEY)


class DecompressorError(Exception):
    """An error of a class that only its decompressor knows, such as that of zstd."""


@pytest.mark.parametrize(("error", "refused"), [(OSError(errno.EIO, "no"), False), (DecompressorError("no"), True)])
def test_a_disk_that_fails_is_no_archive_that_is_wrong(tmp_path, monkeypatch, error, refused):
    (tmp_path / "x.npz").write_bytes(archive())

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(zipfile, "ZipFile", fail)
    with pytest.raises((OSError, FormatError)) as failure:
        fastrack.seal_file(tmp_path / "x.npz", Path(tmp_path, "sealed.safetensors"), KEY)
    assert isinstance(failure.value, FormatError) == refused


@pytest.fixture
def slow_keys():
    """Keys that another thread's transfer has asked for, and that do not come before the test is over."""
    asked, leave = threading.Event(), threading.Event()

    def keys():
        asked.set()
        assert leave.wait(60)
        yield KEY

    sealed = fastrack.seal(np.arange(3), KEY)
    other = threading.Thread(target=lambda: fastrack.to_device(sealed, keys=keys()))
    other.start()
    assert asked.wait(60)
    yield
    leave.set()
    other.join()


@pytest.mark.usefixtures("slow_keys")
@pytest.mark.parametrize(
    "elsewhere", [lambda use: in_forked_child(use, 5), lambda use: within(5, use)], ids=["child", "thread"]
)
def test_a_forked_child_or_a_thread_does_not_wait_for_the_keys_of_another_thread(elsewhere):
    sealed = fastrack.seal(np.arange(3), KEY)
    assert elsewhere(lambda: fastrack.to_device(sealed, keys=KEY, framework="numpy").tolist()) == [0, 1, 2]


@each("member", ["iterations", "lanes", "memory"])
@each("kind", [float, bool])
def test_parameters_of_a_passphrase_are_integers(member, kind):
    given = dataclasses.replace(recipients.PassphraseParameters(bytes(16)), lanes=1)
    with pytest.raises(FormatError, match="within bounds"):
        dataclasses.replace(given, **{member: kind(getattr(given, member))}).check()


@pytest.mark.parametrize("path", ["file:/x.wrapped", "https://host/x.wrapped"])
def test_a_wrapped_key_at_a_url_is_refused_as_other_files_are(path):
    with pytest.raises(ValueError, match="got a URL"):
        wrapped.open_source(f"tpm:sha256:0,7#{path}")
