"""The page that holds the secrets of a lease: who may read it, who may write to it, and what ends with it."""

import fcntl
import gc
import json
import mmap
import os
import pickle
import stat
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from helpers.forking import in_forked_child
from helpers.process_memory import find_in_process

import fastrack
from fastrack import Key, LeaseError
from fastrack._crypto import derivation
from fastrack._crypto.message_keys import MessageKeys
from fastrack._keys import leases
from fastrack._keys.grants import PAYLOAD_TYPE, open_key
from fastrack._keys.leases import LeasePage, Moment, open_page
from fastrack._keys.signing import read_unverified_payload, sign_envelope
from fastrack._sealed.message_headers import open_headers
from fastrack.grants import Grants, Identity, Signer

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="leases need Linux")


@pytest.fixture
def lease():
    """Return a function that makes a page of keys on a lease, which ends with the test."""
    made = []

    def make(*keys, seconds=60.0):
        page = LeasePage.create(keys or [Key.generate()], Moment.now().after(seconds))
        made.append(page)
        return page

    yield make
    for page in made:
        page.end()


def sealed_under(key):
    return fastrack.seal(np.arange(1000.0), key, "x")


def opened(tensor, keys):
    return float(fastrack.to_device(tensor, keys=keys, framework="numpy").sum()) == 499_500.0


def test_a_key_on_a_lease_is_used_as_any_other(lease):
    whole, short = Key.generate(), Key.generate(128)
    secret, tensor = bytes(whole.material()), sealed_under(whole)
    page = lease(whole, short)
    first, second = page.keys
    assert (whole.is_wiped, short.is_wiped, first.bits, second.bits) == (True, True, 256, 128)
    assert bytes(first.material()) == secret
    assert (first == Key.from_bytes(secret), first == second, first.is_wiped) == (True, False, False)
    for keys in (first, [first, second], fastrack.KeyRing([first]), page.source):
        assert opened(tensor, keys)
    assert opened(sealed_under(first), Key.from_bytes(secret))
    with pytest.raises(TypeError, match="pass the `source` of the lease"):
        pickle.dumps(first)
    assert secret.hex() not in repr(first)


def test_restrictions_hold_in_other_processes_too(lease):
    key = Key.generate()
    key.restrict(["ab" * 16], "cd" * 16, 3)
    page = lease(key)
    (found,) = mapped(page).keys
    assert (found.files, found.lineage, found.least_version) == (frozenset(["ab" * 16]), "cd" * 16, 3)


def mapped(page):
    """Map a page as another process does."""
    size = os.fstat(page._descriptor).st_size
    other = LeasePage(page._descriptor, size, is_own=False)
    known = leases._pages.pop(page._place)
    other.read_keys()
    leases._pages[page._place] = known
    return other


def test_only_the_process_with_the_lease_can_write_to_the_page(lease):
    page = lease()
    status = Path(page.source.removeprefix("lease:")).stat()
    size = status.st_size
    assert stat.S_IMODE(status.st_mode) == 0o400
    seals = fcntl.fcntl(page._descriptor, fcntl.F_GET_SEALS)
    assert seals & 0x17 == 0x17
    with pytest.raises(PermissionError):
        mmap.mmap(page._descriptor, size)
    with pytest.raises(PermissionError):
        os.pwrite(page._descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(page._descriptor, 0)  # a reader of what was cut would be killed
    assert mapped(page)._memory.readonly


def test_an_end_is_for_all_and_for_good(lease):
    key = Key.generate()
    tensor = sealed_under(key)
    page = lease(key)
    other = mapped(page)
    ring = fastrack.KeyRing(lambda _: page.keys[0])  # of a provider, whose key the ring keeps
    assert [opened(tensor, each) for each in (page.keys[0], other.keys[0], ring)] == [True] * 3
    page.end("it was given back")
    for keys in (page.keys[0], other.keys[0], ring):
        with pytest.raises(LeaseError, match=f"key {key.id} failed: expected a lease in force"):
            opened(tensor, keys)
    with pytest.raises(LeaseError):
        page.prolong(Moment.now().after(60))
    with pytest.raises(LeaseError):
        open_page(page.source)
    with pytest.raises(LeaseError):
        fastrack.seal(np.zeros(2), page.keys[0])
    assert not any(bytes(page._memory[64:96]))


@pytest.mark.parametrize("clock", ["boottime", "realtime"])
def test_either_clock_ends_a_lease_and_a_step_back_brings_none_back(lease, clock, monkeypatch):
    page = lease(seconds=60.0)
    now = getattr(leases, clock)
    assert page.keys[0].material()
    monkeypatch.setattr(leases, clock, lambda: now() - 3600 * 10**9)  # which prolongs nothing
    assert page.left < 61
    monkeypatch.setattr(leases, clock, lambda: now() + 61 * 10**9)
    with pytest.raises(LeaseError):
        page.keys[0].material()
    monkeypatch.setattr(leases, clock, now)
    with pytest.raises(LeaseError):
        page.keys[0].material()
    assert page.keys[0].is_wiped


@pytest.mark.slow
def test_a_child_ends_though_its_parent_was_killed():
    code = (
        "import os, sys, time, fastrack; from fastrack._keys.leases import *\n"
        "key = fastrack.Key.generate(); page = LeasePage.create([key], Moment.now().after(1.5)); key = page.keys[0]\n"
        "if os.fork(): os.kill(os.getpid(), 9)\n"
        "def use():\n"
        "    try: return len(key.material())\n"
        "    except fastrack.LeaseError: return 'ended'\n"
        "first = use(); time.sleep(1.6); print(first, use(), any(page._memory[64:96]))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, check=False, env=environment, stdout=subprocess.PIPE, text=True)
    assert (found.returncode, found.stdout.split()) == (-9, ["32", "ended", "False"])


def test_a_forked_child_neither_ends_nor_prolongs_for_its_parent(lease):
    page = lease()
    assert in_forked_child(lambda: len(page.keys[0].material())) == 32

    def wipe():
        page.keys[0].wipe()
        with pytest.raises(fastrack.ClosedError):
            page.keys[0].material()
        return True

    assert in_forked_child(wipe)
    assert len(page.keys[0].material()) == 32


def test_no_other_process_writes_to_a_page_whatever_its_clock_says(lease, monkeypatch):
    """Or the one with the lease, which is about to prolong it, would go on with zeros."""
    page = lease()
    secret = bytes(page.keys[0].material())

    def end():
        monkeypatch.setattr(leases, "boottime", lambda: 1 << 62)
        with pytest.raises(LeaseError):
            page.keys[0].material()
        return any(page._memory)

    assert in_forked_child(end) is False
    assert bytes(page.keys[0].material()) == secret


@pytest.mark.slow
def test_what_a_killed_process_left_is_in_no_other_after_the_end():
    code = (
        "import sys, time, fastrack; from fastrack._keys.leases import *\n"
        "key = fastrack.Key.generate(); page = LeasePage.create([key], Moment.now().after(3))\n"
        "print(page.source, bytes(page._memory[64:96]).hex(), flush=True); time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as holder:
        source, secret = holder.stdout.readline().split()
        key = open_page(source).first
        assert key.material().hex() == secret
        holder.kill()
    while not key.page._has_ended:
        time.sleep(0.05)
    assert not any(key._secret)
    with pytest.raises(LeaseError):
        key.material()


def test_a_key_that_is_wiped_ends_the_lease_for_all(lease):
    first, second = Key.generate(), Key.generate()
    page = lease(first, second)
    other = mapped(page)
    page.keys[0].wipe()
    for key in (*page.keys, *other.keys):
        with pytest.raises(fastrack.ClosedError):
            fastrack.seal(np.zeros(2), key)
    with pytest.raises(LeaseError):
        other.keys[0].material()


def test_an_end_within_a_use_is_an_end_of_the_lease(lease):
    """Else it is an error of a key that is zeros, with the status and the advice of that."""
    page = lease()
    secret = page.keys[0].material()
    page.end("it was given back")
    with pytest.raises(LeaseError, match=f"using key {page.keys[0].id} failed: .*given back"):
        derivation.derive(secret, bytes(24), b"")


def test_no_core_dump_has_a_page(lease):
    page = lease()
    other = mapped(page)
    flags = [
        part.split("VmFlags:")[1].splitlines()[0].split()
        for part in Path("/proc/self/smaps").read_text().split("memfd:fastrack lease")[1:]
    ]
    assert len(flags) >= 2, other
    assert all("dd" in each for each in flags)


def test_a_page_that_nothing_uses_is_closed():
    page = LeasePage.create([Key.generate()], Moment.now().after(60))
    leases._pages.pop(page._place)
    descriptor = page._descriptor
    del page
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


@pytest.mark.slow
def test_what_was_derived_is_wiped_without_a_use(lease):
    key = Key.generate()
    tensor, page = sealed_under(key), lease(key)
    fastrack.to_device(tensor[:5], keys=page.keys[0])
    cache = page.keys[0].message_keys
    assert len(cache)
    page.prolong(Moment.now().after(0.1))
    end = time.monotonic() + 10
    while len(cache) and time.monotonic() < end:
        time.sleep(0.01)
    assert len(cache) == 0


@pytest.mark.parametrize(
    "kind", ["folder", "pipe", "file", "memory", "short memory", "nothing", "other text", "others"]
)
def test_what_is_no_page_is_refused_in_a_line(kind, tmp_path, lease):
    page, name = lease(), tmp_path / "file"
    if kind == "folder":
        opened_file = os.open(tmp_path, os.O_RDONLY)
    elif kind == "pipe":
        opened_file, _ = os.pipe()
    elif kind == "file":
        name.write_bytes(bytes(page._memory))
        opened_file = os.open(name, os.O_RDONLY)
    else:
        opened_file = os.memfd_create("other", os.MFD_ALLOW_SEALING)
        os.fchmod(opened_file, 0o400)
        content = bytes(page._memory)
        content = {"short memory": content[:70], "others": content[:64] + bytes(32) + content[96:]}.get(kind, content)
        os.write(opened_file, content)
        if kind != "memory":  # of which another could take its size away
            fcntl.fcntl(opened_file, fcntl.F_ADD_SEALS, 0x17)
    source = f"lease:/proc/{os.getpid()}/fd/{opened_file}"
    if kind == "nothing":
        os.close(opened_file)
    if kind == "other text":
        source = "lease:/proc/self/fd/../fd/3"
    with pytest.raises((fastrack.FormatError, LeaseError)) as caught:
        open_page(source)
    assert "\n" not in str(caught.value)
    if kind != "nothing":
        os.close(opened_file)


def test_no_text_of_a_page_is_trusted(lease):
    page = lease()
    text = bytes(page._memory[96:])
    for change in (b"[]", b"{}", b"[1]", text.replace(b'"bits":256', b'"bits":250'), text * 2, b"\xff", b"["):
        with suppress(KeyError):
            leases._pages.pop(page._place)
        descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
        os.fchmod(descriptor, 0o400)
        head = bytearray(page._memory[:96])
        head[40:48] = len(change).to_bytes(8, sys.byteorder)
        os.write(descriptor, bytes(head) + change)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0x17)
        with pytest.raises(fastrack.FormatError):
            open_page(f"lease:/proc/{os.getpid()}/fd/{descriptor}")
        os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_open_a_page(lease):
    page = lease()

    def ask():
        os.setgid(65533)
        os.setuid(65533)
        leases._pages.clear()
        try:
            open_page(page.source)
        except OSError as error:
            return type(error).__name__
        return "opened"

    assert in_forked_child(ask) == "PermissionError"


SPAWNED = """
import sys
import fastrack
from fastrack._keys.leases import open_page

key = open_page(sys.argv[1]).first if sys.argv[1:] else None
tensor = fastrack.load_file(sys.argv[2])["x"]
for _ in range(3):
    fastrack.to_device(tensor[:5], keys=key, framework="numpy")
    fastrack.to_device(tensor, keys=key, framework="numpy")
print("opened", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_no_process_has_a_secret_after_the_end(lease, tmp_path):
    key = Key.generate()
    fastrack.save_file({"x": np.arange(1000.0)}, tmp_path / "x.safetensors", key)
    tensor, keys = fastrack.load_file(tmp_path / "x.safetensors")["x"], MessageKeys(1)
    open_headers((tensor,), fastrack.KeyRing(key), keys)
    needles = {"key": bytes(key.material()), "message key": bytes(keys.material(0))[:32]}
    keys.wipe()
    page = lease(key)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SPAWNED, page.source, tmp_path / "x.safetensors"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as child:
        assert child.stdout.readline() == "opened\n"
        before = {name for name, _ in find_in_all(child.pid, needles)}
        assert before == {"key", "message key"}  # the control
        page.end()
        end = time.monotonic() + 10
        while (found := find_in_all(child.pid, needles)) and time.monotonic() < end:
            time.sleep(0.1)
        assert found == set()
        child.communicate("\n")


def find_in_all(pid, needles):
    """Search the writable memory of a process, and the page that it reads."""
    found = find_in_process(pid, needles)
    process = Path(f"/proc/{pid}")
    with (process / "maps").open() as maps, (process / "mem").open("rb", 0) as memory:
        for line in maps:
            if "memfd:fastrack lease" in line:
                start, stop = (int(part, 16) for part in line.split()[0].split("-"))
                memory.seek(start)
                data = memory.read(stop - start)
                found |= {(name, "page") for name, value in needles.items() if value in data}
    return found


def test_grants_of_a_lease_are_of_version_2_and_bound_to_its_length():
    key, alice, signer = Key.generate(), Identity.generate(name="alice"), Signer.generate()
    plain = Grants.issue(key, [alice.recipient], signer=signer)
    leased = Grants.issue(key, [alice.recipient], signer=signer, lease=timedelta(hours=1))
    assert (leased.seconds, leased.renew_after, plain.seconds, plain.renew_after) == (3600, 1800, None, None)
    members = {name: json.loads(each) for name, each in (("plain", payload(plain)), ("leased", payload(leased)))}
    assert members["leased"].keys() - members["plain"].keys() == {"seconds", "renew_after"}
    assert (members["plain"]["version"], members["leased"]["version"]) == (1, 2)
    with pytest.raises(fastrack.GrantError, match="lease_keys"):
        leased.unlock(alice)
    for change in ({"seconds": 7200}, {"renew_after": 1}):
        altered = sign(members["leased"] | change, signer)
        with pytest.raises(fastrack.GrantError):
            open_key(altered, alice)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"version": 3},
        {"seconds": 1},
        {"seconds": 10**9},
        {"seconds": None},
        {"seconds": 3600.0},
        {"renew_after": 0},
        {"renew_after": 3600},
        {"renew_after": True},
    ],
    ids=str,
)
def test_other_terms_are_refused(change):
    key, alice, signer = Key.generate(), Identity.generate(name="alice"), Signer.generate()
    leased = Grants.issue(key, [alice.recipient], signer=signer, lease=timedelta(hours=1))
    with pytest.raises(fastrack.FormatError):
        sign(json.loads(payload(leased)) | change, signer)


@pytest.mark.parametrize("lease", [timedelta(0), timedelta(seconds=1), timedelta(days=367)])
def test_a_lease_has_bounds(lease):
    with pytest.raises(ValueError, match="two seconds to 366 days"):
        Grants.issue(Key.generate(), [Identity.generate().recipient], signer=Signer.generate(), lease=lease)


def payload(grants):
    return read_unverified_payload(grants.envelope)


def sign(members, signer):
    content = json.dumps(members, sort_keys=True, separators=(",", ":")).encode()
    return Grants.from_bytes(sign_envelope(content, PAYLOAD_TYPE, [signer]), owner=signer.verifier)


def test_a_lease_for_certain_gpus_says_so_in_every_process_that_opens_it(lease):
    """Version 4 has the members of a lease and those of a place; ciphertexts are bound to all."""
    key, owner, machine = Key.generate(), Signer.generate(), Identity.generate()
    chips = ("AB" * 10, "CD" * 10)
    issue = {"signer": owner, "lease": timedelta(seconds=60), "require": "confidential"}
    grants = Grants.issue(key, [machine.recipient], gpus=chips, **issue)
    payload = json.loads(read_unverified_payload(grants.envelope))
    assert (payload["version"], payload["seconds"], payload["gpus"]) == (4, 60, list(chips))
    for member, value in {"gpus": None, "seconds": 61, "renew_after": 29}.items():
        changed = json.dumps(payload | {member: value}, separators=(",", ":"), sort_keys=True).encode()
        other = Grants.from_bytes(sign_envelope(changed, PAYLOAD_TYPE, [owner]), owner=owner.verifier)
        with pytest.raises(fastrack.GrantError):
            open_key(other, machine)
    page = lease(open_key(grants, machine))
    assert page.keys[0].is_restricted
    code = (
        "import sys\nfrom fastrack._devices import confidential\nfrom fastrack._keys.leases import open_page\n"
        "key = open_page(sys.argv[1]).first\nprint(confidential._process.keys, key._bound)"
    )
    told = subprocess.run([sys.executable, "-c", code, page.source], check=True, stdout=subprocess.PIPE, text=True)
    assert told.stdout.strip() == f"{ {key.id: chips} } {(chips,)}"


def test_a_lease_for_all_confidential_gpus_names_none(lease):
    key, owner, machine = Key.generate(), Signer.generate(), Identity.generate()
    grants = Grants.issue(key, [machine.recipient], signer=owner, lease=timedelta(seconds=60), require="confidential")
    assert lease(open_key(grants, machine)).keys[0]._bound == (None,)
    assert lease(Key.generate()).keys[0]._bound is None


def test_memory_that_cannot_be_replaced_is_told():
    page = mmap.mmap(-1, mmap.PAGESIZE)
    memory = memoryview(page)
    memory[:2] = b"\x07\x07"
    with pytest.warns(ResourceWarning, match="forgetting the memory of a lease failed"):
        leases._forget(memory[1:])  # which does not begin at a page
    assert bytes(memory[:2]) == b"\x07\x07"
    leases._forget(memory)
    assert bytes(memory[:2]) == bytes(2)
