import pickle
import subprocess
import sys
from importlib import import_module

import pytest
from helpers.cases import each

import fastrack
from fastrack import attest
from fastrack.attest._errors import malformed, refused


def test_public_names_are_named_once():
    assert len(attest.__all__) == len(set(attest.__all__))


@each("name", attest.__all__)
def test_every_public_name_is_there(name):
    assert getattr(attest, name) is not None
    assert name in dir(attest)


@each(("name", "home"), sorted(attest._HOMES.items()))
def test_every_lazy_name_is_public_and_comes_from_its_module(name, home):
    assert name in attest.__all__
    assert getattr(attest, name) is getattr(import_module(home), name)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = attest.nonsense


def test_importing_it_loads_neither_cryptography_nor_a_socket():
    code = "import fastrack.attest, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"cryptography", "numpy", "socket", "ssl", "urllib.request"} & set(done.stdout.split())


def test_an_error_has_its_parts_and_survives_a_pickle():
    error = refused("TDX quote", "MRTD", wanted=b"\1\2", found=b"\3" * 100, advice="Measure again.")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is fastrack.AttestationError
    assert str(back) == str(error)
    assert (back.evidence, back.field, back.wanted, back.found) == ("TDX quote", "MRTD", "0102", "03" * 100)
    assert str(error).startswith("verifying the MRTD of the TDX quote failed: expected 0102, got 0303")
    assert str(error).endswith("0303.... Measure again.")


def test_a_format_error_may_be_about_text():
    assert "expected a list as its tcbLevels, got 7" in str(
        malformed("TCB info", "tcbLevels", None, wanted="a list", found=7)
    )
