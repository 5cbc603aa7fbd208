"""Texts of keys that an editor, a checkout or a pipe of Windows has changed: each kind says what happened to it."""

import pytest
from helpers.cases import each
from helpers.commands import invoke

from fastrack import Key, KeyRing
from fastrack.errors import FormatError
from fastrack.grants import Identity, Signer

CHANGES = {
    "its lines end in CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "it begins with a byte order mark": lambda text: b"\xef\xbb\xbf" + text,
    "it is in UTF-16": lambda text: text.decode().encode("utf-16"),
    "it is in UTF-16.": lambda text: text.decode().encode("utf-16-be"),
}
KINDS = {
    "Key": ("key file", Key.generate),
    "Identity": ("secret key file", lambda: Identity.generate(name="alice")),
    "Signer": ("secret key file", lambda: Signer.generate(name="owner")),
    "Recipient": ("public key", lambda: Identity.generate(name="alice").recipient),
    "Verifier": ("public key", lambda: Signer.generate(name="owner").verifier),
}


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """Return a key, the word for its kind, and its file."""
    word, make = KINDS[request.param]
    key = make()
    path = tmp_path_factory.mktemp("keys") / "some.txt"
    key.save(path)
    return key, word, path


@each("told,change", CHANGES.items())
def test_each_kind_says_what_changed_its_text(saved, tmp_path, told, change):
    key, word, path = saved
    other = tmp_path / "some.key"
    other.write_bytes(change(path.read_bytes()))
    other.chmod(0o600)
    with pytest.raises(
        FormatError, match=rf"some\.key is a damaged {word}: {told.rstrip('.')}\. Convert it, as dos2unix"
    ):
        type(key).load(other)


@each("cut", [slice(1, None), slice(-9), slice(40)])
def test_a_cut_text_is_damaged(saved, tmp_path, cut):
    key, word, path = saved
    other = tmp_path / "some.key"
    other.write_bytes(path.read_bytes()[cut])
    other.chmod(0o600)
    with pytest.raises(
        FormatError, match=rf"some\.key (is (a )?damaged|was damaged|is not a fastrack {word}|: expected)"
    ):
        type(key).load(other)


@each("change", [*CHANGES.values()])
def test_another_text_is_not_called_damaged(saved, tmp_path, change):
    key, word, _ = saved
    other = tmp_path / "some.key"
    other.write_bytes(change(b"A letter,\nof two lines\n"))
    other.chmod(0o600)
    with pytest.raises(FormatError, match=f"is not a fastrack {word}"):
        type(key).load(other)


def test_the_text_of_a_public_key_may_be_given_too(saved):
    key, _, path = saved
    if not hasattr(type(key), "parse"):
        pytest.skip("of public keys")
    assert type(key).parse(path.read_text()) == key
    for changed, told in (
        (f"\ufeff{key}", "byte order mark"),
        (f"{key}\r\n", "CRLF"),
        (f"{key}\n{key}\n", "its one line"),
    ):
        with pytest.raises(FormatError, match=rf"the text is a damaged public key: .*{told}"):
            type(key).parse(changed)


@each("change", [lambda text: text.replace(b"\n", b"\r\n"), lambda text: b"\xef\xbb\xbf" + text])
def test_a_folder_tells_of_a_changed_key_file_too(tmp_path, change):
    key = Key.generate()
    key.save(tmp_path / "owner.key")
    (tmp_path / "owner.key").write_bytes(change((tmp_path / "owner.key").read_bytes()))
    with pytest.raises(FormatError, match="Convert it, as dos2unix does"):
        KeyRing(tmp_path)[key.id]


@each("change", [lambda text: text.replace(b"\n", b"\r\n"), lambda text: b"\xef\xbb\xbf" + text])
def test_the_command_tells_of_it(saved, tmp_path, change):
    (tmp_path / "some.txt").write_bytes(change(saved[2].read_bytes()))
    (tmp_path / "some.txt").chmod(0o600)
    result = invoke(["key", str(tmp_path / "some.txt")])
    assert result.exit_code == 5
    assert "Convert it, as dos2unix does" in result.stderr
