"""Compiled code on disk: only whole files of the right key, which none but this user and root could have written."""

import os
import stat

import pytest

from fastrack._crypto import code_cache

KEY = {"target": "this", "sources": "0"}
CODE = bytes(range(40))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(code_cache.VARIABLE, str(tmp_path))
    return tmp_path / "fastrack"


def test_code_is_found_again_under_its_key_alone(folder):
    path = code_cache.write("unit", KEY, CODE)
    assert path == folder / "unit"
    assert code_cache.read("unit", KEY) == (CODE, path)
    assert code_cache.read("other", KEY) is None
    for key in ({**KEY, "sources": "1"}, {"target": "this"}, {**KEY, "more": 1}, {}):
        assert code_cache.read("unit", key) is None
    code_cache.write("unit", {**KEY, "sources": "1"}, b"newer")
    assert code_cache.read("unit", KEY) is None


@pytest.mark.usefixtures("folder")
def test_a_file_that_is_cut_short_or_altered_anywhere_is_not_used():
    path = code_cache.write("unit", KEY, CODE)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert code_cache.read("unit", KEY) is None, size
        path.write_bytes(data[:size] + bytes([data[size] ^ 1]) + data[size + 1 :])
        assert code_cache.read("unit", KEY) is None, size
    path.write_bytes(data + b"\0")
    assert code_cache.read("unit", KEY) is None
    path.write_bytes(data)
    assert code_cache.read("unit", KEY) == (CODE, path)


def test_others_may_read_and_not_write_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        path = code_cache.write("unit", KEY, CODE)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, path)] == [0o755, 0o644]


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_others_can_write_to_is_not_used(folder, what, mode):
    path = code_cache.write("unit", KEY, CODE)
    open_to_others = path if what == "file" else folder
    open_to_others.chmod(open_to_others.stat().st_mode | mode)
    with pytest.warns(RuntimeWarning, match=str(open_to_others)):
        assert code_cache.read("unit", KEY) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_another_user_owns_is_not_used(folder, what):
    path = code_cache.write("unit", KEY, CODE)
    os.chown(path if what == "file" else folder, 12345, 12345)
    with pytest.warns(RuntimeWarning, match="owner 12345"):
        assert code_cache.read("unit", KEY) is None
    if what == "folder":
        with pytest.warns(RuntimeWarning, match="owner 12345"), pytest.raises(PermissionError):
            code_cache.write("unit", KEY, CODE)
    else:
        assert code_cache.write("unit", KEY, CODE) == path  # it takes the place of the other user's


@pytest.mark.usefixtures("folder")
def test_a_file_that_others_could_write_to_is_replaced_by_one_that_they_cannot():
    path = code_cache.write("unit", KEY, CODE)
    path.chmod(0o666)
    code_cache.write("unit", KEY, CODE)
    assert code_cache.read("unit", KEY) == (CODE, path)


def test_links_folders_and_pipes_are_not_followed_opened_or_waited_for(folder):
    path = code_cache.write("unit", KEY, CODE)
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    assert code_cache.read("unit", KEY) is None
    path.unlink()
    path.mkdir()
    assert code_cache.read("unit", KEY) is None
    path.rmdir()
    os.mkfifo(path)
    assert code_cache.read("unit", KEY) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="gives links to another user")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_link_of_another_user_on_the_way_to_the_folder_is_not_followed(tmp_path, monkeypatch, depth):
    """In a folder such as /tmp another user can lead a path to whatever this user has unpacked or downloaded."""
    own = tmp_path / "own"
    monkeypatch.setenv(code_cache.VARIABLE, str(own))
    code_cache.write("unit", KEY, CODE)
    link = tmp_path / "shared" / "fastrack" if depth == 0 else tmp_path / "shared"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(own / "fastrack" if depth == 0 else own)
    monkeypatch.setenv(code_cache.VARIABLE, str(tmp_path / "shared"))
    path = tmp_path / "shared" / "fastrack" / "unit"
    assert code_cache.read("unit", KEY) == (CODE, path)
    assert code_cache.writable_folder() == path.parent
    os.lchown(link, 12345, 12345)
    with pytest.warns(RuntimeWarning, match=f"{link} is not used.* owner 12345"):
        assert code_cache.read("unit", KEY) is None
    with pytest.warns(RuntimeWarning, match="owner 12345"), pytest.raises(PermissionError):
        code_cache.write("unit", KEY, CODE)
    assert code_cache.writable_folder() is None
    assert (own / "fastrack" / "unit").exists()


@pytest.mark.skipif(not hasattr(os, "setresuid"), reason="cannot become another user for a while")
def test_a_folder_that_cannot_be_looked_into_is_none_to_write_to(folder):
    """As where a container runs as a user with the home of root."""
    folder.parent.chmod(0)
    users = os.getresuid()
    try:
        if os.geteuid() == 0:
            os.setresuid(12345, 12345, 0)
        assert code_cache.writable_folder() is None
        assert code_cache.read("unit", KEY) is None
        with pytest.raises(PermissionError):
            code_cache.write("unit", KEY, CODE)
    finally:
        os.setresuid(*users)
        folder.parent.chmod(0o700)


def test_code_is_read_from_every_folder_and_written_to_the_first_that_can_be(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    later = tmp_path / "later"
    monkeypatch.setattr(code_cache, "folders", lambda: [blocked / "cache", later])
    assert code_cache.write("unit", KEY, CODE) == later / "unit"
    assert code_cache.read("unit", KEY) == (CODE, later / "unit")
    monkeypatch.setattr(code_cache, "folders", lambda: [blocked / "cache"])
    with pytest.raises(OSError, match="file"):
        code_cache.write("unit", KEY, CODE)
    assert code_cache.read("unit", KEY) is None


def test_without_the_variable_the_package_comes_first_and_the_user_second(monkeypatch, tmp_path):
    monkeypatch.delenv(code_cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package, user = code_cache.folders()
    assert package.parent.name == "__pycache__"
    assert user == tmp_path / "fastrack"
    monkeypatch.setenv(code_cache.VARIABLE, "")
    assert code_cache.folders() == [package, user]
    monkeypatch.setenv(code_cache.VARIABLE, "relative")
    assert code_cache.folders() == [tmp_path.cwd() / "relative" / "fastrack"]


def test_a_relative_folder_in_a_working_directory_that_was_removed_holds_no_code(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    monkeypatch.setenv(code_cache.VARIABLE, "relative")
    assert code_cache.read("unit", KEY) is None
    with pytest.raises(FileNotFoundError):
        code_cache.write("unit", KEY, CODE)


def test_a_user_without_a_home_has_the_folder_of_the_package_alone(monkeypatch):
    for name in (code_cache.VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where no user has this number
    assert [folder.name for folder in code_cache.folders()] == ["code"]
    monkeypatch.setenv(code_cache.VARIABLE, "~/cache")
    assert len(code_cache.folders()) == 1
