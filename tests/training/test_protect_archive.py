"""The archive that a protected `torch.save` seals is the one that torch writes."""

import io
import struct
import sys
import zipfile
import zlib

import pytest

from fastrack._protect.archive import Archive

torch = pytest.importorskip("torch")

TEXTS = [("data.pkl", b"\x80\x02}q\x00.", 6), (".format_version", "1", 1), (".storage_alignment", "64", 2)]
NATIVE = ("byteorder", sys.byteorder, len(sys.byteorder))


def storage(size):
    return torch.arange(size).to(torch.uint8).untyped_storage()


def stored(*sizes):
    return [(f"data/{number}", storage(size), size) for number, size in enumerate(sizes)]


class Kept:
    """File that keeps what is written, but for what is large, of which it keeps the size."""

    def __init__(self):
        self.pieces = []

    def write(self, data):
        size = memoryview(data).nbytes
        self.pieces.append(bytes(data) if size < 1 << 20 else b"<%d>" % size)
        return size


def archives(records, checked=True, alignment=64):
    """Return what torch writes, and what `Archive` does."""
    ours, theirs = Kept(), Kept()
    for archive in (Archive(ours.write, checked, alignment), torch._C.PyTorchFileWriter(theirs, checked, alignment)):
        for record in records:
            archive.write_record(*record)
        archive.write_end_of_file()
    return b"".join(theirs.pieces), b"".join(ours.pieces)


def without_id(content):
    """Leave out the digits that tell archives apart, and their checksums."""
    place = content.rindex(b"PK\7\10") - 40
    digits = content[place : place + 40]
    assert digits.isdigit()
    return content.replace(digits, b"").replace(struct.pack("<I", zlib.crc32(digits)), b"")


@pytest.mark.parametrize("alignment", [1, 64, 4096])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("records", [[], TEXTS, [*TEXTS, NATIVE, *stored(10, 0, 64, 1000, 0)]], ids=len)
def test_the_archive_is_that_of_torch_byte_for_byte(records, checked, alignment):
    theirs, ours = archives(records, checked, alignment)
    assert without_id(ours) == without_id(theirs)


def test_the_archive_is_a_whole_zip_file_and_states_have_ids_of_their_own():
    ids = set()
    for size in (10, 11):
        _, content = archives([*TEXTS, *stored(size)])
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None
            assert archive.read("archive/data/0") == bytes(range(size))
            ids.add(archive.read("archive/.data/serialization_id"))
    assert len(ids) == 2


@pytest.mark.slow
def test_records_that_32_or_16_bits_do_not_count_are_written_as_torch_does():
    large = torch.empty((4 << 30) + 5, dtype=torch.uint8).untyped_storage()  # no page of it is touched
    ends = [("data/1", large, large.nbytes()), ("data/2", storage(5), 5), ("data/3", storage(0), 0)]
    theirs, ours = archives([*TEXTS, ("data/0", large, large.nbytes()), *ends], checked=False)
    assert without_id(ours) == without_id(theirs)
    theirs, ours = archives([*TEXTS, *[(f"data/{number}", b"x", 1) for number in range(0x10000)]])
    assert without_id(ours) == without_id(theirs)
