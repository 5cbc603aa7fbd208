"""Read files of Python's own tests by many readers from `fastrack.open_bytes`, as from the disk."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import plistlib
import random
import tarfile
import wave
import zipfile
from pathlib import Path

import numpy as np
import pytest
import test
from PIL import Image

import fastrack

SEALS = os.environ["FASTRACK_PEERS_MODE"] == "fastrack"
KEY = fastrack.Key.generate()
FOLDER = Path(test.__file__).parent
COUNT, MOST = 400, 3_000_000


def tar(file, mode="r:*"):
    with tarfile.open(fileobj=file, mode=mode) as archive:
        return [(each.name, archive.extractfile(each).read() if each.isfile() else None) for each in archive]


def tar_stream(file):
    return tar(file, "r|*")


def zipped(file):
    with zipfile.ZipFile(file) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def image(file):
    picture = Image.open(file)
    return picture.size, picture.mode, picture.tobytes()


def sound(file):
    with wave.open(file) as opened:
        return opened.getparams(), opened.readframes(opened.getnframes())


def tail(file):
    end = file.seek(0, io.SEEK_END)
    file.seek(-min(100, end), io.SEEK_END)
    return file.read()


READERS = {
    "tar": tar,
    "tar_stream": tar_stream,
    "zip": zipped,
    "is_zip": zipfile.is_zipfile,
    "is_tar": tarfile.is_tarfile,
    "image": image,
    "wave": sound,
    "gzip": lambda file: gzip.GzipFile(fileobj=file).read(),
    "bz2": lambda file: bz2.BZ2File(file).read(),
    "lzma": lambda file: lzma.LZMAFile(file).read(),  # noqa: SIM115
    "npy": lambda file: np.load(file, allow_pickle=False).tolist(),
    "text": lambda file: io.TextIOWrapper(file, "latin-1").read(),
    "lines": list,
    "peek": lambda file: file.peek(10)[:10],
    "tail": tail,
    "plist": plistlib.load,
    "digest": lambda file: hashlib.file_digest(file, "sha256").hexdigest(),
    "fromfile": lambda file: np.fromfile(file, np.uint8).tolist(),
    "fileno": lambda file: file.fileno() > 0,
}


def files():
    found = [path for path in sorted(FOLDER.rglob("*")) if path.suffix not in {".py", ".pyc", ".txt"}]
    found = [path for path in found if path.is_file() and path.stat().st_size < MOST]
    random.Random(0).shuffle(found)
    return found[:COUNT]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_a_file_reads_as_from_the_disk(path, reader):
    read = READERS[reader]
    with path.open("rb") as file:
        try:
            expected, refusal = read(file), None
        except Exception as error:  # noqa: BLE001 - the same is expected of both
            expected, refusal = None, type(error)
    try:
        found = read(opened(path))
    except Exception as error:
        if type(error) is not refusal:
            raise
    else:
        assert (found, refusal) == (expected, None)


def opened(path):
    if not SEALS:
        return path.open("rb")
    sealed = fastrack.seal(np.frombuffer(path.read_bytes(), np.uint8).copy(), KEY, name="bytes")
    return fastrack.open_bytes(sealed, KEY)
