import copy
import pickle
from pathlib import Path

import pytest
from helpers.cases import each

import fastrack
from fastrack import errors

EVERY_ERROR = [getattr(errors, name) for name in errors.__all__]


@each("error", EVERY_ERROR)
def test_every_error_is_a_fastrack_error(error):
    assert issubclass(error, errors.FastrackError)


@each("error", EVERY_ERROR)
def test_every_error_is_a_public_name(error):
    assert getattr(fastrack, error.__name__) is error
    assert error.__name__ in fastrack.__all__


@each("error", EVERY_ERROR)
@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_a_pickle(error, protocol):
    back = pickle.loads(pickle.dumps(error("do this instead"), protocol))
    assert type(back) is error
    assert str(back) == "do this instead"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_authentication_error_keeps_tensor_and_chunk(duplicate):
    back = duplicate(errors.AuthenticationError("chunk 7 failed", tensor="images", chunk=7))
    assert (str(back), back.tensor, back.chunk) == ("chunk 7 failed", "images", 7)


def test_an_authentication_error_may_know_neither_tensor_nor_chunk():
    error = errors.AuthenticationError("the header failed")
    assert (error.tensor, error.chunk) == (None, None)


def test_tensor_and_chunk_are_given_by_name():
    with pytest.raises(TypeError):
        errors.AuthenticationError("chunk 7 failed", "images", 7)


@each("error", EVERY_ERROR)
def test_a_message_is_shown_as_it_was_written(error):
    assert str(error("key 'a' is needed\nadd it")) == "key 'a' is needed\nadd it"


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.FormatError, ValueError),
        (errors.UnknownKeyError, LookupError),
        (errors.KeyPermissionError, PermissionError),
    ],
)
def test_errors_are_caught_as_the_builtin_they_resemble(error, builtin):
    with pytest.raises(builtin):
        raise error("do this instead")


def test_an_authentication_error_is_not_taken_for_a_wrong_value():
    assert not issubclass(errors.AuthenticationError, (ValueError, LookupError, OSError))


def test_the_tree_drawn_at_the_top_of_the_file_names_every_error():
    lines = Path(errors.__file__).read_text(encoding="utf-8").splitlines()
    drawn = [line.split()[2] for line in lines if line.startswith(("# ├", "# └"))]
    assert sorted([*drawn, "FastrackError"]) == sorted(errors.__all__)
