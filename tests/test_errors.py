import copy
import pickle
from pathlib import Path

import pytest
from helpers.cases import each

import fastrack
from fastrack import errors

EVERY_ERROR = [getattr(errors, name) for name in errors.__all__]


@each("error", EVERY_ERROR)
def test_every_error_is_public_and_keeps_its_message_in_pickles_too(error):
    assert issubclass(error, errors.FastrackError)
    assert getattr(fastrack, error.__name__) is error
    assert error.__name__ in fastrack.__all__
    message = "key 'a' is needed\nadd it"
    assert str(error(message)) == message
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error(message), protocol))
        assert (type(back), str(back)) == (error, message)


def test_an_authentication_error_keeps_tensor_and_chunk_which_are_given_by_name():
    error = errors.AuthenticationError("chunk 7 failed", tensor="images", chunk=7)
    for back in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (str(back), back.tensor, back.chunk) == ("chunk 7 failed", "images", 7)
    unknown = errors.AuthenticationError("the header failed")
    assert (unknown.tensor, unknown.chunk) == (None, None)
    with pytest.raises(TypeError):
        errors.AuthenticationError("chunk 7 failed", "images", 7)


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
