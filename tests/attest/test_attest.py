import pickle

import fastrack
from fastrack.attest._errors import malformed, refused


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
