"""fastrack, and two readers that were written after only docs/format.md, read every case of the test kit alike."""

from functools import lru_cache

import package_reader
import pytest
from fastrack_testkit import cases
from helpers import reference
from helpers.by_hand import RefusedError, kit, messages

KINDS = sorted(kit.READERS)
ENCRYPTED = ["block", "data-set", "folder", "message", "sealed", "widened"]  # in which the readers by hand differ


@lru_cache
def cases_of(kind):
    return tuple(cases(kind))


def by_hand(cipher):
    def read(case):
        try:
            return kit.read(case, cipher), "success"
        except RefusedError as error:
            return None, error.kind

    return read


def disagreements(kind, read):
    """Return a line for each case that a reader takes for something else."""
    lines = []
    for case in cases_of(kind):
        found, outcome = read(case)
        if outcome != case.expect:
            lines.append(f"{case.name} ({case.rule}): expected {case.expect}, got {outcome}")
        elif found != case.result:
            lines.append(f"{case.name} ({case.rule}): expected another result than {found}")
    return lines


def test_all_kinds_have_cases_and_readers():
    assert {case.kind for case in cases()} == set(KINDS) == package_reader.READERS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_fastrack_reads_the_kit(kind):
    assert not disagreements(kind, package_reader.read)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reader_by_hand_reads_the_kit(kind):
    assert not disagreements(kind, by_hand(messages))


@pytest.mark.parametrize("kind", ENCRYPTED)
def test_the_reader_by_hand_reads_the_kit_chunk_by_chunk(kind):
    assert not disagreements(kind, by_hand(reference))
