"""New files: room is made beforehand where that is possible, and nothing is left of one that fails."""

import ctypes
import errno
import os
import signal
import stat
import sys
from unittest.mock import Mock

import pytest
from helpers import file_systems
from helpers.cases import each
from helpers.forking import in_forked_child

from fastrack import Anchor, Key
from fastrack._util import atomic, new_folder
from fastrack.grants import Grants, Identity, Signer
from fastrack.providers import WrappedKey

MIB = 1 << 20


def fails_with(problem):
    """An outcome of one call of `fallocate`."""
    results = iter([-1])

    def fallocate(*_):
        ctypes.set_errno(problem)
        return next(results, 0)

    return fallocate


def write(path, claimed=4 * MIB):
    content = os.urandom(4 * MIB)
    with atomic.new_file(path, claimed) as file:
        file.write(content[:10])
        file.write(content[10:])
    assert path.read_bytes() == content


@each("claimed", [0, 1, 4 * MIB, 5 * MIB])
def test_a_file_is_as_long_as_what_was_written(tmp_path, claimed):
    write(tmp_path / "file", claimed)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_room_is_made_before_anything_is_written(tmp_path, monkeypatch):
    file_systems.refuse_unnamed(monkeypatch)  # a file with a name can be looked at
    with atomic.new_file(tmp_path / "file", 4 * MIB) as file:
        (part,) = tmp_path.iterdir()
        assert part.stat().st_size == 0
        if part.stat().st_blocks:  # the file system can
            assert part.stat().st_blocks * 512 >= 4 * MIB
        file.write(b"x")


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_is_too_full_is_found_out_beforehand(tmp_path, monkeypatch, problem):
    file_systems.answer(monkeypatch, fallocate=fails_with(problem))
    written = []
    with pytest.raises(OSError, match="free some space") as failure, atomic.new_file(tmp_path / "file", 4 * MIB):
        written.append(1)
    assert failure.value.errno == problem
    assert not written
    assert not list(tmp_path.iterdir())


@each("problem", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EINTR])
def test_a_file_system_that_sets_no_room_aside_does_without(tmp_path, monkeypatch, problem):
    file_systems.answer(monkeypatch, fallocate=fails_with(problem))
    write(tmp_path / "file")


def test_a_system_without_these_calls_does_without(tmp_path, monkeypatch):
    file_systems.answer(monkeypatch, fallocate=None, sync_file_range=None)
    write(tmp_path / "file")


def test_what_is_large_is_on_its_way_to_the_disk_at_once(tmp_path, monkeypatch):
    calls = []
    file_systems.answer(monkeypatch, sync_file_range=lambda _, *arguments: calls.append(arguments) or -1)
    write(tmp_path / "file")
    assert calls == [(10, 4 * MIB - 10, 2)]


# Names, modes and links


@pytest.fixture(params=["unnamed", "named", "without links"])
def system(request, monkeypatch):
    """Run with files that have no name at first, with temporary names, and on a file system without links."""
    if request.param == "unnamed" and not atomic._UNNAMED:
        pytest.skip("this system has no files without names")
    if request.param != "unnamed":
        file_systems.refuse_unnamed(monkeypatch)
    if request.param == "without links":
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no links here")))
    return request.param


@pytest.fixture
def foreign(monkeypatch):
    """Give a path to another user, or make this process another user."""

    def give(path):
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534, follow_symlinks=False)
        else:
            another = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: another)
        return path

    return give


def record_modes(modes):
    """An `os.open` that notes the modes of what may be new."""
    opened = os.open

    def record(path, flags, *mode, **more):
        modes.extend([mode] if flags & os.O_WRONLY else [])
        return opened(path, flags, *mode, **more)

    return record


def mode_of(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("old", [b"what was there before", None])
def test_a_file_has_its_name_at_the_end_alone(tmp_path, system, old):
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    with atomic.new_file(path) as file:
        file.write(b"new")
        assert (path.read_bytes() if path.exists() else None) == old
        others = [other.name for other in tmp_path.iterdir() if other != path]
        assert len(others) == (system != "unnamed")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not atomic._UNNAMED, reason="this system has no files without names")
def test_nothing_is_left_of_a_file_whose_process_is_killed(tmp_path):
    def write_and_die():
        with atomic.new_file(tmp_path / "file") as file:
            file.write(b"plaintext" * 100_000)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError, match=f"ended with status {signal.SIGKILL:d}"):
        in_forked_child(write_and_die)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("old", [None, b"old"])
def test_nothing_is_left_of_a_file_whose_naming_is_interrupted(tmp_path, monkeypatch, old):
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    link = os.link

    def interrupted(*args, **options):
        link(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic.new_file(path) as file:
        file.write(b"new")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": old or b"new"}


@pytest.mark.usefixtures("system")
@each("early", [True, False])
@each("kind", ["file", "link"])
def test_a_file_that_is_there_or_appears_meanwhile_is_not_replaced_unless_it_may_be(tmp_path, early, kind):
    path = tmp_path / "file"

    def appear():
        path.write_text("precious") if kind == "file" else path.symlink_to("elsewhere")

    if early:
        appear()

    def write_without_overwriting():
        with atomic.new_file(path, overwrite=False) as file:
            assert not early
            file.write(b"new")
            appear()

    with pytest.raises(FileExistsError, match="was left as it was"):
        write_without_overwriting()
    assert path.is_symlink() if kind == "link" else path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("system")
def test_a_file_that_appears_meanwhile_is_replaced_if_it_may_be(tmp_path):
    with atomic.new_file(tmp_path / "file") as file:
        file.write(b"new")
        (tmp_path / "file").write_text("old")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.usefixtures("system")
@each(("mode", "expected"), [(0o666, 0o644), (0o600, 0o600)])
def test_a_new_file_has_its_mode_from_the_first_moment(tmp_path, monkeypatch, mode, expected):
    modes = []
    monkeypatch.setattr(os, "open", record_modes(modes))
    umask = os.umask(0o022)
    try:
        with atomic.new_file(tmp_path / "file", mode=mode) as file:
            file.write(b"new")
    finally:
        os.umask(umask)
    assert modes[0] == (mode,)
    assert mode_of(tmp_path / "file") == expected


@pytest.mark.usefixtures("system")
@each("mode", [0o600, 0o640, 0o664])
def test_a_file_that_is_replaced_leaves_its_mode_which_comes_last(tmp_path, monkeypatch, mode):
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(mode)
    modes = []
    monkeypatch.setattr(os, "open", record_modes(modes))
    monkeypatch.setattr(os, "chmod", lambda *_, **__: pytest.fail("changed a mode by name"))
    with atomic.new_file(tmp_path / "file") as file:
        file.write(b"new")
    assert modes[0] == (0o600,)
    assert mode_of(tmp_path / "file") == mode


def test_the_mode_of_a_file_of_another_user_is_not_taken_over(tmp_path, foreign):
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o666)
    foreign(tmp_path / "file")
    with atomic.new_file(tmp_path / "file", mode=0o600) as file:
        file.write(b"plaintext")
    assert mode_of(tmp_path / "file") == 0o600


def test_a_link_that_another_user_made_is_not_followed(tmp_path, foreign):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "planted").symlink_to("mine")
    (tmp_path / "link").symlink_to("planted")
    foreign(tmp_path / "planted")
    for name in ("planted", "link"):
        with pytest.raises(PermissionError, match="link of another user"):
            write(tmp_path / name)
    assert (tmp_path / "mine").read_text() == "mine"


def test_links_of_this_user_are_followed_to_their_end(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "other")
    (tmp_path / "folder" / "other").symlink_to("../file")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "file").is_symlink()
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        write(tmp_path / "round")


def test_other_systems_are_not_asked(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert atomic._from_libc("fallocate") is None
    monkeypatch.undo()
    assert atomic._from_libc("there_is_no_such_function") is None


@pytest.mark.parametrize("make", [atomic.new_file, new_folder.new_folder])
def test_an_error_names_the_target_and_not_a_temporary_name(tmp_path, make):
    with pytest.raises(FileNotFoundError) as caught, make(tmp_path / "absent" / "x"):
        pytest.fail("reached")
    assert caught.value.filename == str(tmp_path / "absent" / "x")


# What cannot be made again


@pytest.fixture
def irreplaceable(tmp_path):
    """A file of each kind that nothing of the package may replace, by name."""
    signer, key, folder = Signer.generate(), Key.generate(), tmp_path / "kept"
    folder.mkdir()
    key.save(folder / "key")
    signer.save(folder / "signer")
    signer.verifier.save(folder / "signer.pub")
    Identity.generate().save(folder / "identity")
    Anchor.create(folder / "anchor", owner=signer.verifier)
    Grants.issue(key, [Identity.generate().recipient], signer=signer).save(folder / "grants")
    wrapped = WrappedKey("aws-kms", "SYMMETRIC_DEFAULT", key.id, key.bits, b"ciphertext", {"key": "owner"})
    wrapped.save(folder / "wrapped")
    (folder / "attested").write_text('{"challenge":"00","grants":["AA=="]}\n')
    (folder / "edited").write_bytes(b"\xef\xbb\xbf\r\n" + (folder / "key").read_bytes().replace(b"\n", b"\r\n"))
    (folder / "bare").write_bytes((folder / "key").read_bytes().partition(b"\n")[2])
    return folder


@pytest.mark.usefixtures("system")
def test_no_key_anchor_or_grants_is_ever_replaced(irreplaceable):
    for path in irreplaceable.iterdir():
        before = path.read_bytes()
        with pytest.raises(FileExistsError, match="left as it was"), atomic.new_file(path) as file:
            file.write(b"new")
        link = irreplaceable / "link"
        link.symlink_to(path.name)
        with pytest.raises(FileExistsError, match="left as it was"), atomic.new_file(link) as file:
            file.write(b"new")
        link.unlink()
        assert path.read_bytes() == before, path.name


@pytest.mark.usefixtures("system")
def test_a_key_that_appears_meanwhile_is_not_replaced(tmp_path, irreplaceable):
    def write_late():
        with atomic.new_file(tmp_path / "file") as file:
            file.write(b"new")
            (irreplaceable / "key").rename(tmp_path / "file")

    with pytest.raises(FileExistsError, match="holds a key"):
        write_late()
    assert (tmp_path / "file").read_bytes().startswith(b"# fastrack key")
    assert not list(tmp_path.glob(".fastrack-*"))


@each(
    "content",
    [
        b"",
        b"{",
        b'{"key":1,"provider":2}',
        b"# a comment",
        b"fastrack",
        b'{"payload":"","payloadType":"other"}',
        b"\n" * 99,
    ],
)
def test_other_files_are_replaced(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    write(tmp_path / "file")


def test_grants_follow_those_of_the_same_key_alone(tmp_path):
    signer, recipients = Signer.generate(), [Identity.generate().recipient]
    key = Key.generate()
    first = Grants.issue(key, recipients, signer=signer)
    first.save(tmp_path / "a.grants")
    again = first.add([Identity.generate().recipient], signer=signer, key=key)
    again.save(tmp_path / "a.grants")
    with pytest.raises(FileExistsError, match="holds grants"):
        Grants.issue(Key.generate(), recipients, signer=signer).save(tmp_path / "a.grants")
    assert Grants.load(tmp_path / "a.grants", owner=signer.verifier).serial == again.serial


# Folders


def test_a_folder_is_written_by_what_it_is_and_not_by_its_name(tmp_path):
    (tmp_path / "victim").mkdir(mode=0o700)

    def write_files():
        with new_folder.new_folder(tmp_path / "out") as folder:
            (part,) = tmp_path.glob(".fastrack-*")
            part.rename(tmp_path / "moved")
            part.symlink_to("victim")
            (folder / "more").mkdir()
            for path in (folder / "file", folder / "more" / "file"):
                with atomic.new_file(path) as file:
                    file.write(b"plaintext")
            assert len(list((tmp_path / "moved").rglob("file"))) == 2

    with pytest.raises(PermissionError, match="another in its place"):
        write_files()
    assert list((tmp_path / "victim").iterdir()) == []
    assert mode_of(tmp_path / "victim") == 0o700
    assert list((tmp_path / "moved").iterdir()) == []
    assert not os.path.lexists(tmp_path / "out")


@each(("umask", "expected"), [(0o022, 0o755), (0o077, 0o700), (0, 0o755)])
def test_a_folder_is_for_its_owner_alone_until_it_is_complete(tmp_path, umask, expected):
    before = os.umask(umask)
    try:
        with new_folder.new_folder(tmp_path / "out", mode=0o755):
            (part,) = tmp_path.glob(".fastrack-*")
            assert mode_of(part) == 0o700
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "out") == expected


@pytest.mark.parametrize("other", ["folder", "link"])
def test_a_folder_that_was_exchanged_at_once_is_refused(tmp_path, monkeypatch, foreign, other):
    (tmp_path / "victim").mkdir(mode=0o700)
    made = os.mkdir
    (tmp_path / "planted").mkdir()

    def exchange(path, *given, **more):
        made(path, *given, **more)
        part = tmp_path / path
        part.rename(tmp_path / "moved")
        part.symlink_to("victim") if other == "link" else foreign((tmp_path / "planted").rename(part))

    monkeypatch.setattr(os, "mkdir", exchange)
    with pytest.raises(OSError, match="out"), new_folder.new_folder(tmp_path / "out"):
        pytest.fail("reached")
    monkeypatch.undo()
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_folder_of_this_user_that_was_put_in_its_place_keeps_what_it_has(tmp_path, monkeypatch):
    (tmp_path / "victim").mkdir(mode=0o700)
    (tmp_path / "victim" / "work").write_bytes(b"of a year")
    made = os.mkdir

    def exchange(path, *given, **more):
        made(path, *given, **more)
        (tmp_path / path).rmdir()
        (tmp_path / "victim").rename(tmp_path / path)

    monkeypatch.setattr(os, "mkdir", exchange)
    with pytest.raises(PermissionError, match="another in its place"), new_folder.new_folder(tmp_path / "out"):
        pytest.fail("reached")
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    assert (left / "work").read_bytes() == b"of a year"


@each("error", [None, ZeroDivisionError()])
def test_a_forked_child_that_leaves_the_block_leaves_the_folder_to_its_parent(tmp_path, error):
    target = tmp_path / f"out-{error!r}"
    block = new_folder.new_folder(target)
    folder = block.__enter__()
    (folder / "work").write_bytes(b"of a year")
    in_forked_child(lambda: block.__exit__(type(error) if error else None, error, None))
    assert not target.exists()
    block.__exit__(None, None, None)
    assert (target / "work").read_bytes() == b"of a year"


def test_errors_in_a_folder_name_the_folder_that_is_to_be(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, new_folder.new_folder(tmp_path / "out") as folder:
        (folder / "a" / "b").read_bytes()
    assert caught.value.filename == str(tmp_path / "out" / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_folders_that_were_made_for_a_file_that_failed_are_removed(tmp_path):
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "a" / "b" / "file", tmp_path / "there" / "c" / "file"):
        with pytest.raises(ValueError, match="failed"), new_folder.made_parents(path):
            raise ValueError("failed")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    with new_folder.made_parents(tmp_path / "a" / "file"):
        pass
    assert (tmp_path / "a").is_dir()
