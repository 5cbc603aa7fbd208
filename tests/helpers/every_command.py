"""A line for each command of fastrack, and a folder with all that they need."""

import functools
import json
import shutil
from contextlib import closing
from importlib.util import find_spec

import numpy as np
import pytest
from cli.conftest import Script
from typer.main import get_command

import fastrack
from fastrack.attest._broker.ledger import Ledger
from fastrack.grants import Verifier
from fastrack.providers import WrappedKey
from helpers import local_machine
from helpers.commands import application, whole
from helpers.foundry.machine import Machine, policy
from helpers.profiles import STAGES, document
from helpers.vendor_services import VendorServices

KEY = "-k owner.key"
BROKER = "--policy policy.toml --signer owner.signer --insecure-loopback"
OFFERED = "--challenge challenge --policy policy.toml"
HOLDER = "--holder a=owner.signer.pub"
HELD = "--owner owner.signer.pub --plan-digest DIGEST"
SECRET = b"a secret line"
TRAIN = "helpers.tour_files:train"  # which loads torch
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
    "broker head": "broker head TARGET --database broker.db --signer owner.signer",
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
    "run": f"run folder {KEY} -- true folder",
    "doctor": "doctor",
    "help": "help seal",
    "completion": "completion bash",
    "warmup": "warmup",  # writes only in the cache of CuPy
    "attest show": "attest show offer",
    "attest verify": f"attest verify offer {OFFERED}",
    "broker log": "broker log --database broker.db",
    "broker machines": "broker machines --database broker.db",
    "broker compare": "broker compare broker.db broker.db",
    "tour verify": "tour verify tour --owner owner.signer.pub --partial",
    "plan transfer": f"plan transfer --size 1MiB {PROFILE}",
    "plan epoch": f"plan epoch --samples 100 --row 1KiB --batch 10 {PROFILE}",
    "plan checkpoint": f"plan checkpoint --size 1MiB {PROFILE}",
    "plan collective": f"plan collective --size 1MiB {PROFILE}",
    "plan load": f"plan load --size 1MiB {PROFILE}",
    "plan validate": f"plan validate {PROFILE.split()[1]}",
}
SLOW = {"demo", "plan measure", "qualify", "tour run"}  # run in their own tests
BESIDE = {"index"}  # writes beside its source, which training/test_shard_index.py tests
BESIDE |= {"tour stop"}  # appends to the log of a desk, which cli/test_tour.py tests
BESIDE |= {"broker quarantine", "broker lift"}  # append to that of a broker: cli/test_quarantine_commands.py
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


@functools.cache
def every_command():
    """Return the commands by their words."""

    def leaves(command, *names):
        members = getattr(whole(command), "commands", {})
        found = {leaf: each for name in members for leaf, each in leaves(members[name], *names, name).items()}
        return found or {" ".join(names): command}

    return leaves(get_command(application()))


def machine(patch):
    """Have commands collect and verify the evidence of a made-up machine, and serve nothing."""
    made = Machine("tdx", 1)
    local_machine.replace(patch, lambda binding, **_: made.collect(binding))
    if find_spec("uvicorn"):
        patch.setattr("fastrack._service.server.serve", lambda make, **_: make())
    return made


def prepare(folder):
    """Fill a folder with all that the commands need, and return it."""
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
        fastrack.save_checkpoint("model.safetensors", {"model": {}, "optimizer": {}}, key="owner.key")
        cli("publish model.safetensors --sign owner.signer")
        cli(COMMANDS["tour plan"].replace("TARGET", "tour"))
        with closing(fastrack.tour.TourLedger("tour.db")) as ledger:
            ledger.bind("owner", plan_of(folder).digest)
        (folder / "machine.json").write_text(json.dumps(document(STAGES)))
    return folder


def plan_of(folder):
    return fastrack.tour.Chain.load(folder / "tour/tour.chain", owner=Verifier.load(folder / "owner.signer.pub")).plan


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def words_of(line, folder):
    """Return the words of a line of a table, in a folder."""
    line = line.replace("DIGEST", plan_of(folder).digest) if "DIGEST" in line else line
    return [word.strip("'") for word in line.split()]
