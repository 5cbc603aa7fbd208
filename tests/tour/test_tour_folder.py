"""The contents of a folder of a tour, verified without any key."""

import numpy as np
import pytest
from helpers.tour_rig import Rig

import fastrack
from fastrack import FormatError
from fastrack.grants import Signer
from fastrack.tour import _visit
from fastrack.tour._folder import FILES, verify_files

CHAIN = FILES[2]


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def contents(rig, visits):
    return {name: np.fromfile(rig.folder / f"v{visits}" / name, np.uint8) for name in FILES}


def test_a_folder_is_verified_before_the_first_visit_and_after_each(rig):
    for number in range(3):
        assert len(verify_files(contents(rig, number), rig.owner.verifier).visits) == number
        rig.visit(number)


@pytest.mark.parametrize("name", FILES)
def test_no_byte_of_any_file_can_be_another(rig, name):
    rig.visit(0)
    found = contents(rig, 1)
    for place in range(0, found[name].size, 61):
        found[name][place] ^= 1
        with pytest.raises(fastrack.FastrackError):
            verify_files(found, rig.owner.verifier)
        found[name][place] ^= 1
    verify_files(found, rig.owner.verifier)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_visit_is_refused(rig, name):
    rig.visit(0)
    rig.visit(1)
    with pytest.raises(fastrack.FastrackError):
        verify_files({**contents(rig, 1), name: contents(rig, 2)[name]}, rig.owner.verifier)


def test_a_model_whose_messages_have_no_digest_is_refused(rig, monkeypatch):
    describe = _visit.describe
    monkeypatch.setattr(_visit, "describe", lambda path, digests: describe(path))
    rig.visit(0)
    with pytest.raises(FormatError, match="a SHA-256 of each message, got none"):
        verify_files(contents(rig, 1), rig.owner.verifier)


def test_other_files_and_other_owners_are_refused(rig):
    found = contents(rig, 0)
    with pytest.raises(FormatError, match="got other files"):
        verify_files({**found, "more": found[CHAIN]}, rig.owner.verifier)
    with pytest.raises(fastrack.SignatureError):
        verify_files(found, Signer.generate().verifier)
