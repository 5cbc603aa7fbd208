"""Commands that write, run once more: nothing is lost, doubled, replaced, or left in plain.

Each row of the table is a command that writes TARGET, in a folder with all that it needs. It is run, run again, and run
with each file that cannot be made again, and with a folder, in the place of TARGET.
"""

import json
import shutil
from contextlib import closing
from importlib.util import find_spec

import numpy as np
import pytest
from cli.conftest import Script
from helpers.commands import invoke
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots
from helpers.profiles import STAGES, document
from helpers.tour_files import TRAIN
from helpers.vendor_services import VendorServices
from typer.main import get_command

from fastrack import SealedDataset, attest, save_checkpoint, tour
from fastrack.attest._broker.ledger import Ledger
from fastrack.grants import Verifier
from fastrack.providers import WrappedKey

KEY = "-k owner.key"
BROKER = "--policy policy.toml --signer owner.signer --insecure-loopback"
OFFERED = "--challenge challenge --policy policy.toml"
HOLDER = "--holder a=owner.signer.pub"
HELD = "--owner owner.signer.pub --plan-digest DIGEST"
SECRET = b"a secret line"
PROFILE = "--profile machine.json"
COMMANDS = {
    "keygen": "keygen TARGET",
    "keygen, an identity": "keygen TARGET --identity",
    "keygen, a signer": "keygen TARGET --signer",
    "seal": f"seal notes.txt TARGET.safetensors {KEY}",
    "seal into a folder": f"seal notes.txt TARGET {KEY}",
    "seal with --force": f"seal notes.txt TARGET.safetensors --force {KEY}",
    "seal an array with --force": f"seal array.npy TARGET.safetensors --force {KEY}",
    "seal for others": "seal notes.txt TARGET.safetensors --to reader.pub --sign owner.signer",
    "seal for others with --force": "seal notes.txt TARGET.safetensors --force --to reader.pub --sign owner.signer",
    "seal a folder": f"seal study TARGET {KEY}",
    "seal a folder for others": "seal study TARGET --to reader.pub --sign owner.signer",
    "seal file by file": f"seal -r study TARGET --force {KEY}",
    "seal a glob": f"seal 'study/*' TARGET --force {KEY}",
    "import": f"import lines.txt TARGET {KEY}",
    "import, resumed": f"import lines.txt TARGET --resume {KEY}",
    "unseal": f"unseal sealed.safetensors TARGET {KEY}",
    "unseal with --force": f"unseal sealed.safetensors TARGET --force {KEY}",
    "unseal a folder": f"unseal folder TARGET {KEY}",
    "unseal file by file": f"unseal -r files TARGET --force {KEY}",
    "rekey": f"rekey sealed.safetensors TARGET {KEY} --new other.key",
    "rekey with --force": f"rekey sealed.safetensors TARGET --force {KEY} --new other.key",
    "publish": "publish sealed.safetensors --sign owner.signer -o TARGET",
    "anchor": "anchor TARGET --owner owner.signer.pub",
    "grant": "grant owner.key --to reader.pub --sign owner.signer -o TARGET",
    "grant, changed": "grant owner.grants --to second.pub --sign owner.signer --key owner.key -o TARGET",
    "bench": "bench --size 0.01 --repeat 1 --json TARGET",
    "bench, a timeline": "bench --size 0.01 --repeat 1 --timeline TARGET",
    "attest challenge": "attest challenge TARGET",
    "attest collect": "attest collect challenge TARGET",
    "attest fetch": "attest fetch offer TARGET --bundle carried",
    "attest policy": "attest policy offer TARGET",
    "attest grant": f"attest grant offer {OFFERED} --sign owner.signer {KEY} --out TARGET",
    "broker serve": f"broker serve {BROKER} {KEY} --database TARGET",
    "tour plan": f"tour plan model.safetensors TARGET --train {TRAIN} --signer owner.signer {HOLDER} --order a",
    "tour own": f"tour own tour {BROKER} {KEY} --database TARGET",
    "tour hold": f"tour hold tour {HELD} --data sealed.safetensors {BROKER} {KEY} --database TARGET",
    "tour key": f"tour key tour TARGET --owner owner.signer.pub {KEY}",
}
AGAIN = {"import, resumed", "publish", "grant, changed", "seal file by file", "seal a glob"}
AGAIN |= {"attest fetch", "bench", "bench, a timeline", "broker serve", "tour own", "tour hold"}
"""Commands that may be run again without --force, or with a folder in the place of the target."""
READING = {
    "key": "key owner.key",
    "inspect": "inspect sealed.safetensors folder",
    "verify": f"verify sealed.safetensors folder {KEY}",  # an anchor is moved on by it, and has tests of its own
    "doctor": "doctor",
    "help": "help seal",
    "warmup": "warmup",  # writes in the cache of CuPy alone
    "attest show": "attest show offer",
    "attest verify": f"attest verify offer {OFFERED}",
    "broker log": "broker log --database broker.db",
    "tour verify": "tour verify tour --owner owner.signer.pub --partial",
    "plan transfer": f"plan transfer --size 1MiB {PROFILE}",
    "plan epoch": f"plan epoch --samples 100 --row 1KiB --batch 10 {PROFILE}",
    "plan checkpoint": f"plan checkpoint --size 1MiB {PROFILE}",
    "plan collective": f"plan collective --size 1MiB {PROFILE}",
    "plan load": f"plan load --size 1MiB {PROFILE}",
    "plan validate": f"plan validate {PROFILE.split()[1]}",
}
SLOW = {"demo", "plan measure", "tour run"}  # run in their own tests
BESIDE = {"index"}  # writes beside its source, which training/test_shard_index.py tests
FAILING = {
    "nothing matches": f"seal 'nope*' TARGET {KEY}",
    "nothing to seal": f"seal empty TARGET {KEY}",
    "no glob of --plain matches": f"seal study TARGET --plain 'nope*' {KEY}",
    "all that is there fails": f"seal -r files TARGET {KEY}",
    "no importable source": f"import sealed.safetensors TARGET {KEY}",
    "a malformed source": f"import bad.jsonl TARGET {KEY}",
    "a wrong key for a folder": "unseal folder TARGET -k other.key",
    "a wrong key for files": "unseal -r files TARGET -k other.key",
    "a wrong key": "unseal sealed.safetensors TARGET -k other.key",
}


def machine(patch):
    """Have commands collect and verify the evidence of a made-up machine, and serve nothing."""
    made = Machine("tdx", 1)
    patch.setattr(attest, "collect_evidence", lambda binding, **_: made.collect(binding))
    patch.setattr("fastrack.attest._exchange.VENDOR_ROOTS", roots())
    for module in ("attest", "collateral"):
        patch.setattr(f"fastrack._cli.commands.{module}.read_clock", lambda: NOW)
    if find_spec("uvicorn"):
        patch.setattr("fastrack.attest._broker.server.serve", lambda *_, **__: None)
    return made


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with all that the commands need."""
    folder = tmp_path_factory.mktemp("prepared")
    cli = Script(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        mine = machine(patch)
        for made in ("owner.key", "other.key", "reader --identity", "second --identity", "owner.signer --signer"):
            cli(f"keygen {made}")
        for name in ("study", "empty", "lost"):
            (folder / name).mkdir()
        for name in ("notes.txt", "study/a.json", "study/b.txt"):
            (folder / name).write_bytes(SECRET)
        (folder / "lines.txt").write_bytes(b"".join(b"%s %d\n" % (SECRET, index) for index in range(50)))
        (folder / "bad.jsonl").write_bytes(b"{")
        np.save("array.npy", np.frombuffer(SECRET, np.uint8))
        cli(f"seal notes.txt sealed.safetensors {KEY}")
        cli(f"seal study folder {KEY}")
        cli(f"seal -r study files {KEY}")
        cli("grant owner.key --to reader.pub --sign owner.signer -o owner.grants")
        cli("grant other.key --to reader.pub --sign owner.signer -o lost/grants")
        cli("anchor lost/anchor --owner owner.signer.pub")
        for name in ("owner.key", "reader", "owner.signer", "owner.signer.pub"):
            shutil.copy(name, folder / "lost" / name)
        wrapped = WrappedKey("aws-kms", "SYMMETRIC_DEFAULT", 32 * "0", 256, b"x", {"key": "owner"})
        wrapped.save(folder / "lost" / "wrapped")
        (folder / "policy.toml").write_text(policy(1))
        cli("attest challenge challenge")
        cli("attest collect challenge offer")
        with VendorServices(mine).running() as services:
            cli(f"attest fetch offer carried {services.options}")
        Ledger("broker.db").close()
        save_checkpoint("model.safetensors", {"model": {}, "optimizer": {}}, key="owner.key")
        cli("publish model.safetensors --sign owner.signer")
        cli(COMMANDS["tour plan"].replace("TARGET", "tour"))
        with closing(tour.TourLedger("tour.db")) as ledger:
            ledger.bind("owner", plan_of(folder).digest)
        (folder / "machine.json").write_text(json.dumps(document(STAGES)))
    return folder


@pytest.fixture
def place(folder, prepared, monkeypatch):
    """A copy of that folder, in which the commands run."""
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    machine(monkeypatch)
    return folder


def plan_of(folder):
    return tour.Chain.load(folder / "tour/tour.chain", owner=Verifier.load(folder / "owner.signer.pub")).plan


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def target_of(name):
    """Return the name of the target of a command."""
    return next(word for word in COMMANDS[name].split() if word.startswith("TARGET"))


def is_target(name):
    return name.startswith(("TARGET", "challenge.used-")) or name == "challenge"  # which is used up


def others(files):
    return {path: content for path, content in files.items() if not is_target(path)}


def targets(folder):
    return {path: content for path, content in contents(folder).items() if path.startswith("TARGET")}


def may_run_again(name):
    return name in AGAIN or ("--force" in COMMANDS[name] and "--to" not in COMMANDS[name])


def require_packages(name):
    if name.startswith(("broker", "tour own", "tour hold")):
        pytest.importorskip("uvicorn")


def test_every_command_is_in_a_table():
    from fastrack._cli.app import app

    def leaves(command, *names):
        return {
            leaf for name, each in getattr(command, "commands", {}).items() for leaf in leaves(each, *names, name)
        } or {" ".join(names)}

    commands = leaves(get_command(app))
    words = [line.split() for line in COMMANDS.values()]
    written = {" ".join(line[:2]) if line[0] in {"attest", "broker", "plan", "tour"} else line[0] for line in words}
    assert written | READING.keys() | SLOW | BESIDE == commands
    assert not written & READING.keys()


def attempt(cli, line):
    """Run a command, which may be refused, and return whether it was done."""
    if "DIGEST" in line:
        line = line.replace("DIGEST", plan_of(cli.folder).digest)
    result = invoke([part.strip("'") for part in line.split()])
    assert not list(cli.folder.rglob(".fastrack-*")), line
    return result.exit_code == 0


EACH = [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("bench")) for name in COMMANDS]


@pytest.mark.parametrize("name", EACH)
def test_a_second_run_loses_and_doubles_nothing(cli, place, name):
    require_packages(name)
    before = contents(place)
    assert attempt(cli, COMMANDS[name])
    first = contents(place)
    is_done = attempt(cli, COMMANDS[name])
    second = contents(place)
    assert is_done == may_run_again(name)
    assert second.keys() == first.keys()
    assert is_done or second == first
    assert others(second) == others(before)
    if not COMMANDS[name].startswith("unseal"):
        assert not [path for path, content in second.items() if is_target(path) and SECRET in content]
    if name.startswith("import"):
        assert len(SealedDataset("TARGET", keys="owner.key")) == 50


READERS_OF_FILES = ("seal", "import", "unseal", "rekey", "publish")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith(READERS_OF_FILES)])
def test_a_second_run_with_other_input_replaces_all_of_the_result_or_nothing(cli, place, name):
    assert attempt(cli, COMMANDS[name])
    first = targets(place)
    for path in ("notes.txt", "lines.txt", "study/a.json", "study/b.txt"):
        (place / path).write_bytes(b"another\n")
    np.save("array.npy", np.frombuffer(b"another\n", np.uint8))
    shutil.rmtree("folder")
    for line in ("notes.txt sealed.safetensors --force", "study folder", "-r study files --force"):
        cli(f"seal {line} {KEY}")
    is_done = attempt(cli, COMMANDS[name])
    assert is_done == (may_run_again(name) and name != "import, resumed")
    if not is_done:
        assert targets(place) == first
    elif not name.startswith("publish"):
        result = place / target_of(name)
        if not name.startswith("unseal"):
            key = "other.key" if name.startswith("rekey") else "owner.key"
            cli(f"unseal {'-r ' if result.is_dir() else ''}{result.name} back -k {key}")
            result = place / "back"
        opened = contents(result) if result.is_dir() else {result: result.read_bytes()}
        assert opened
        assert not [path for path, content in opened.items() if SECRET in content or b"another" not in content]


@pytest.mark.parametrize("name", EACH)
def test_nothing_that_cannot_be_made_again_is_replaced(cli, place, name):
    lost = sorted((place / "lost").iterdir())
    before = contents(place)
    for suffix in ("", ".pub", ".grants"):
        target = target_of(name) + suffix
        for path in lost[:2] if suffix else lost:
            content = path.read_bytes()
            shutil.copy(path, place / target)
            is_done = attempt(cli, COMMANDS[name])
            assert (place / target).read_bytes() == content, (target, path)
            assert suffix or not is_done, path
            after = contents(place)
            assert others(after) == others(before)
            for left in place.glob("TARGET*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


@pytest.mark.parametrize("line", ["bench --size 0.01 --picture kept.png", "demo --picture kept.png"])
def test_no_chart_replaces_a_key(cli, place, line):
    shutil.copy(place / "owner.key", place / "kept.png")
    before = contents(place)
    assert "holds a key" in cli.error(line)
    assert contents(place) == before


@pytest.mark.parametrize("name", READING)
def test_a_command_that_reads_writes_nothing(cli, place, name):
    require_packages(name)
    before = contents(place)
    assert attempt(cli, READING[name])
    after = contents(place)
    assert {path: after[path] for path in after if not path.startswith("broker.db-")} == before  # SQLite's own


@pytest.mark.parametrize("name", COMMANDS)
def test_files_in_a_folder_of_the_name_stay(cli, place, name):
    shutil.copytree(place / "lost", place / target_of(name))
    (place / target_of(name) / "notes").write_bytes(b"other")
    before = contents(place)
    attempt(cli, COMMANDS[name])
    after = contents(place)
    assert {path: after.get(path) for path in before} == before


@pytest.mark.parametrize("name", FAILING)
def test_a_command_that_fails_leaves_no_target_and_the_right_one_works_then(cli, place, name):
    before = contents(place)
    assert not attempt(cli, FAILING[name])
    assert not (place / "TARGET").exists()
    assert contents(place) == before
    assert attempt(cli, COMMANDS["seal a folder"])


def test_a_resumed_import_of_another_source_changes_nothing(cli, place):
    assert attempt(cli, COMMANDS["import"])
    before = contents(place / "TARGET")
    lines = (place / "lines.txt").read_bytes().splitlines(keepends=True)
    others = {"later": lines[25:], "more in front": [b"new\n", *lines], "fewer": lines[:-1], "turned": lines[::-1]}
    for name, other in others.items():
        (place / "lines.txt").write_bytes(b"".join(other))
        assert "resume" in cli.error(COMMANDS["import, resumed"]), name
        assert contents(place / "TARGET") == before
    (place / "lines.txt").write_bytes(b"".join([*lines, b"one more\n"]))
    assert cli.json(COMMANDS["import, resumed"])["samples"] == 51


@pytest.mark.parametrize("name", [name for name, line in COMMANDS.items() if line.split()[0] != "keygen"])
def test_an_empty_argument_is_not_the_current_folder(place, name):
    before = contents(place)
    line = [part.strip("'") for part in COMMANDS[name].split()]
    for index, part in enumerate(line):
        if part == target_of(name) or (index == 1 and not part.startswith("-")):
            result = invoke([*line[:index], "", *line[index + 1 :]])
            assert result.exit_code in ({1, 2} if line[0] in {"grant", "attest"} else {2}), result.output
            assert contents(place) == before
