"""Files that decide something are refused where another user may replace what they hold. Users are real ones here."""

import contextlib
import os
import shutil
import ssl
import struct
import subprocess
import sys
import tempfile
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.cases import each
from helpers.commands import invoke

from fastrack import Anchor, Key, KeyPermissionError
from fastrack._cli.documents import write_document
from fastrack._util import locations, rights
from fastrack.grants import Identity, Signer, Verifier

OTHER = 12345
POLICY = "version = 1\n"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can be other users")


def wrapped(path):
    from fastrack.providers import WrappedKey

    written = WrappedKey("aws-kms", "SYMMETRIC_DEFAULT", "0" * 32, 256, b"x", {})
    path.write_bytes(written.to_bytes())
    return lambda: WrappedKey.load(path)


def saved(make, load):
    def write(path):
        make(path)
        return lambda: load(path)

    return write


def policy(path):
    from fastrack.attest import Policy

    path.write_text(POLICY)
    return lambda: Policy.from_toml(path)


def ledger(path):
    from fastrack.attest._broker.ledger import Ledger

    Ledger(path)
    return lambda: Ledger(path)


def replaced(path):
    from fastrack._cli.commands.grant import Replaced

    Replaced(path, ()).add("0" * 64)
    return lambda: Replaced.load(path)


def tls_key(path):
    server = pytest.importorskip("fastrack._service.server", exc_type=ImportError)
    path.write_text("no PEM")
    path.chmod(0o600)

    def serve():
        with contextlib.suppress(ssl.SSLError):  # which it ends with, once the key was accepted
            server.serve(None, host="127.0.0.1", port=0, certificate=path, private_key=path)

    return serve


def make_cache(path):
    from fastrack._remote.cache import Cache

    return Cache(path)


def cache(path):
    make_cache(path)
    return lambda: make_cache(path)


def cache_in_use(path):
    version = SimpleNamespace(validator="v", size=10)
    kept = make_cache(path)
    return lambda: kept.open(locations.Url("http://127.0.0.1/a"), version)


def collateral(path):
    from fastrack.attest._device_collateral import check_folder

    path.mkdir()
    return lambda: check_folder(path)


DECIDING = {
    "key": saved(lambda path: Key.generate().save(path), Key.load),
    "signer": saved(lambda path: Signer.generate().save(path), Signer.load),
    "identity": saved(lambda path: Identity.generate().save(path), Identity.load),
    "verifier": saved(Signer.generate().verifier.save, Verifier.load),
    "anchor": saved(lambda path: Anchor.create(path, owner=Signer.generate().verifier), Anchor),
    "wrapped key": wrapped,
    "policy": policy,
    "list of replaced grants": replaced,
    "broker's database": ledger,
    "broker's TLS key": tls_key,
    "cache of remote files": cache,
    "cache of remote files, in use": cache_in_use,
    "owner's collateral": collateral,
}


def owned_by_another(path):
    os.chown(path, OTHER, OTHER)


def written_by_others(path):
    path.chmod(path.stat().st_mode | 0o002)


def written_by_a_group(path):
    os.chown(path, 0, OTHER)
    path.chmod(path.stat().st_mode | 0o020)


def in_a_folder_of_another(path):
    os.chown(path.parent, OTHER, OTHER)


def in_a_folder_that_others_write(path):
    path.parent.chmod(0o777)


def in_a_folder_that_a_group_writes(path):
    os.chown(path.parent, 0, OTHER)
    path.parent.chmod(0o770)


def below_a_folder_of_another(path):
    os.chown(path.parents[1], OTHER, OTHER)


def below_a_folder_that_others_write(path):
    path.parents[1].chmod(0o777)


def behind_a_link_of_another(path):
    real = path.parents[1]
    moved = real.rename(real.with_name("moved"))
    real.symlink_to(moved)
    os.lchown(real, OTHER, OTHER)


def a_link_of_another(path):
    path.symlink_to(path.rename(path.with_name("moved")))
    os.lchown(path, OTHER, OTHER)


def behind_a_link_through_a_folder_that_others_write(path):
    real = path.parents[1]
    shared = real.with_name("shared")
    shared.mkdir()
    shared.chmod(0o777)
    real.symlink_to(real.rename(shared / "moved"))


SPOILED = [
    owned_by_another,
    written_by_others,
    written_by_a_group,
    in_a_folder_of_another,
    in_a_folder_that_others_write,
    in_a_folder_that_a_group_writes,
    below_a_folder_of_another,
    below_a_folder_that_others_write,
    behind_a_link_of_another,
    behind_a_link_through_a_folder_that_others_write,
    a_link_of_another,
]


@needs_root
@each("spoil", SPOILED)
@each("name", DECIDING)
def test_what_another_user_may_replace_is_refused(name, spoil, tmp_path):
    path = tmp_path / "above" / "folder" / "it"
    path.parent.mkdir(parents=True, mode=0o755)
    use = DECIDING[name](path)
    use()
    path.parents[1].chmod(0o1777)  # as /tmp, where a file of one's own is safe
    use()
    path.parents[1].chmod(0o775)  # of a group without other members, as with a umask of 002
    use()
    spoil(path)
    with pytest.raises(PermissionError):
        use()


@needs_root
def test_an_ordinary_user_is_told_from_others_too():
    above = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        above.chmod(0o755)
        for name, owner in (("own", OTHER), ("root", 0), ("another", OTHER + 1)):
            (above / name).mkdir()
            (above / name).chmod(0o755)
            (above / name / "it").touch()
            os.chown(above / name, owner, owner)
            os.chown(above / name / "it", owner, owner)
        os.seteuid(OTHER)
        for name in ("own", "root"):
            rights.require_own(above / name / "it")
        with pytest.raises(KeyPermissionError):
            rights.require_own(above / "another" / "it")
    finally:
        os.seteuid(0)
        shutil.rmtree(above)


@each("umask", [0, 0o002, 0o077])
def test_what_fastrack_makes_it_takes_whatever_the_umask(tmp_path, monkeypatch, umask):
    monkeypatch.chdir(tmp_path)
    before = os.umask(umask)
    try:
        rights.make_own(tmp_path / "above" / "folder")
        rights.make_own(tmp_path / "above" / "folder")  # once more
        for command in ("keygen signer --signer", "keygen machine --identity", "anchor anchor --owner signer.pub"):
            assert invoke(command.split()).exit_code == 0
        write_document("policy.toml", POLICY.encode())
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("above", "above/folder")] == [0o700, 0o700]
    for name in ("above/folder", "signer", "signer.pub", "machine", "machine.pub", "anchor", "policy.toml"):
        rights.require_own(tmp_path / name)


def test_the_sticky_bit_is_for_what_is_in_a_folder_and_not_for_the_folder(tmp_path):
    tmp_path.chmod(0o1777)
    (tmp_path / "it").touch()
    rights.require_own(tmp_path / "it")
    with pytest.raises(KeyPermissionError):
        rights.require_own(tmp_path)


# Of `linux/posix_acl_xattr.h`: a tag, rights and an id.
ENTRY = struct.Struct("<HHI")


def test_an_access_control_list_may_name_others(tmp_path):
    path = tmp_path / "it"
    path.touch()
    path.chmod(0o620)
    rights.require_own(path)  # of a group without other members
    everyone = 0xFFFFFFFF  # an entry without an id
    entries = [(1, 6, everyone), (2, 6, OTHER), (4, 0, everyone), (0x10, 6, everyone), (0x20, 0, everyone)]
    try:
        os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(starmap(ENTRY.pack, entries)))
    except OSError as error:
        pytest.skip(f"no access control lists here: {error.strerror}")
    assert path.stat().st_mode & 0o777 == 0o660
    with pytest.raises(KeyPermissionError):
        rights.require_own(path)


# As an ordinary user does, who is root there: the machine's root has no number then.
IN_A_NAMESPACE = """
import codecs, ctypes, os, sys
from pathlib import Path
from fastrack._util.rights import make_own, require_own

codecs.lookup("ascii")  # which imports a module, and Python may be in a folder of root's
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: the files in /proc are the user's again
if ctypes.CDLL(None).unshare(0x10000000):  # CLONE_NEWUSER
    sys.exit(77)
Path("/proc/self/uid_map").write_text(f"0 {sys.argv[1]} 1")
assert os.stat("/").st_uid == 65534
require_own(sys.argv[2])
"""


@needs_root
def test_root_without_a_number_is_trusted_in_a_user_namespace_alone():
    above = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        above.chmod(0o755)
        (above / "it").touch()
        os.chown(above / "it", OTHER, OTHER)
        environment = {**os.environ, "PYTHONPATH": str(Path(rights.__file__).parents[2])}
        command = [sys.executable, "-c", IN_A_NAMESPACE, str(OTHER), str(above / "it")]
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 77:
            pytest.skip("no user namespace may be made here")
        assert done.returncode == 0, done.stderr
        os.chown(above / "it", 0, 0)
        os.chown(above, 65534, 65534)
        with pytest.raises(KeyPermissionError):
            rights.require_own(above / "it")
    finally:
        shutil.rmtree(above)


def test_a_file_that_others_write_is_refused_by_its_name(tmp_path):
    path = tmp_path / "it"
    path.touch()
    rights.require_own(path)
    path.chmod(0o646)
    with pytest.raises(KeyPermissionError, match=f"{path} .*mode 0646.*chmod go-w {path}"):
        rights.require_own(path)


def test_a_pipe_has_no_folders():
    read, write = os.pipe()
    try:
        rights.require_own(f"/proc/self/fd/{read}", os.fstat(read))
    finally:
        os.close(read)
        os.close(write)
