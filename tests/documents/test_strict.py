"""JSON that has one meaning to all parsers."""

import pytest

from fastrack._documents.strict import parse_strict


@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity", "-0"])
@pytest.mark.parametrize("place", ["%s", '{"a": %s}', '[{"a": [1, %s]}]'])
def test_numbers_that_parsers_read_differently_are_refused(place, text):
    with pytest.raises(ValueError, match=r"out of range|no JSON|expected 0"):
        parse_strict(place % text)


@pytest.mark.parametrize("text", ["0", "-1", "1e308", "1.5e-999", "-0.0"])
def test_others_are_read(text):
    assert parse_strict(f"[{text}]") == [float(text)]
