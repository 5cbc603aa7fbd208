"""``fastrack qualify``: rows that each fail for their own fault, records that hold, and nothing that is left behind."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import local_machine
from helpers.copies import copy_tree
from helpers.foundry.machine import Machine, policy
from safetensors.numpy import save_file

import fastrack
import fastrack_bench
from fastrack._keys.signing import sign_envelope
from fastrack.grants import Signer
from fastrack_bench.qualification import machine, record, rows
from fastrack_bench.qualification.stage import private_folder

pytest.importorskip("uvicorn")

PACKAGE = Path(fastrack.__file__).parent
NAMES = [name for name, _ in rows.ROWS]
SHARDS = [f"model-{number}-of-3.safetensors" for number in (1, 2, 3)]
# The rows that need what this machine lacks, with their state; all others pass.
ELSEWHERE = {
    "this machine, by the policy": "not here",
    "another measurement": "stand-in",
    "a debug machine": "stand-in",
    "a stale challenge": "stand-in",
    "another challenge's proof": "stand-in",
    "a GPU in dev-tools mode": "stand-in",
    "a GPU that is not ready": "stand-in",
    "NVLink encryption only": "stand-in",
    "states of the GPUs": "not here",
    "dumps, swap, debuggers": "read",
}
PARENT = "plaintext in the parent"  # whose memory may not be read everywhere


def make_model(folder):
    """Seal a model of three shards with an index, a configuration, a tokenizer and a vocabulary."""
    rng = np.random.default_rng(1)
    (folder / "plain").mkdir()
    places = {}
    for number, shard in enumerate(SHARDS):
        tensors = {f"layer.{number}.{part}": rng.standard_normal((32, 64), np.float32) for part in "ab"}
        save_file(tensors, folder / "plain" / shard)
        places |= dict.fromkeys(tensors, shard)
    (folder / "plain/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "plain/config.json").write_text('{"model_type": "llama"}')
    (folder / "plain/tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    (folder / "plain/spm.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.warns(UserWarning, match="spm.model"):
        fastrack.seal_folder(folder / "plain", folder / "sealed", folder / "owner.key")
    shutil.rmtree(folder / "plain")


@pytest.fixture
def model(cli, key, folder):
    make_model(folder)
    (folder / "policy.toml").write_text(policy(0))
    cli("keygen owner.signer --signer")
    cli("publish sealed --sign owner.signer")
    cli("anchor owner.anchor --owner owner.signer.pub")
    return f"qualify sealed {key} --policy policy.toml --anchor owner.anchor"


def choose(monkeypatch, names):
    """Have a run only these rows."""
    monkeypatch.setattr(rows, "ROWS", tuple(row for row in rows.ROWS if row[0] in names))


def states(found):
    return {row["name"]: row["state"] for row in found["rows"]}


@pytest.mark.slow
def test_a_sound_folder_fails_no_row_and_leaves_nothing_behind(cli, model):
    before, anchor = cli.names(), Path("owner.anchor").read_bytes()
    found = cli.json(f"{model} --sign owner.signer --out record")
    expected = dict.fromkeys(NAMES, "passed") | ELSEWHERE
    told = states(found)
    assert told.pop(PARENT) in {"passed", "not here"}
    del expected[PARENT]
    assert told == expected, found["rows"]
    assert sum(found["counts"].values()) == len(NAMES) >= 38
    assert found["counts"]["passed"] >= 30
    assert cli.names() == sorted([*before, "record"])
    assert Path("owner.anchor").read_bytes() == anchor
    shown = cli("qualify --verify record --owner owner.signer.pub").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert all(f"{number:2} {told.get(name, '')}" in shown for number, name in enumerate(NAMES, 1))
    assert cli.json("qualify --verify record --owner owner.signer.pub") == found


@pytest.mark.usefixtures("model")
@pytest.mark.slow
def test_what_was_not_asked_is_said(cli, key, monkeypatch):
    choose(monkeypatch, [name for name in NAMES if "broker" not in name])
    shutil.copytree("sealed", "copy")
    Path("copy/fastrack.manifest").unlink()
    found = cli.json(f"qualify copy {key}")
    unasked = {row["name"]: row["seen"] for row in found["rows"] if row["state"] == "not asked"}
    assert unasked.keys() == {
        "under the anchor",
        "older than the anchor",
        "this machine, by the policy",
        "another measurement",
        "a debug machine",
    }
    assert all("no --" in reason for reason in unasked.values())


def test_a_machine_that_proves_itself_passes_the_rows_of_evidence(cli, model, monkeypatch):
    made = Machine("snp", 0)
    local_machine.replace(monkeypatch, lambda binding, **_: made.collect(binding))
    proving = [name for name in ELSEWHERE if name.startswith(("this", "another", "a stale", "a debug"))]
    choose(monkeypatch, proving)
    assert states(cli.json(model)) == dict.fromkeys(proving, "passed") | {"a debug machine": "stand-in"}
    Path("policy.toml").write_text(policy(1))
    assert states(cli.json(model, status=1))["this machine, by the policy"] == "FAILED"
    text = policy(0).replace("measurement = ['" + "22" * 48 + "']", "measurement = 'any'")
    Path("policy.toml").write_text(text + "allow_debug = true\n")
    found = states(cli.json(model, status=1))
    assert found == dict.fromkeys(proving, "passed") | {"another measurement": "FAILED", "a debug machine": "FAILED"}


def test_a_machine_that_should_give_evidence_and_does_not_fails(cli, model, monkeypatch):
    tee = rows.machine.read_tee()
    monkeypatch.setattr(rows.machine, "read_tee", lambda: type(tee)("AMD SEV-SNP", ("/dev/sev-guest",)))
    choose(monkeypatch, ["this machine, by the policy"])
    assert states(cli.json(model, status=1)) == {"this machine, by the policy": "FAILED"}


def test_a_damaged_folder_fails_and_its_record_says_so(cli, model, monkeypatch):
    choose(monkeypatch, ["genuine load", "another key"])
    path = Path("sealed", SHARDS[2])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = cli.json(f"{model} --sign owner.signer -o record", status=1)
    assert states(found)["genuine load"] == "FAILED"
    assert not found["ok"]
    assert "FAILED" in cli("qualify --verify record --owner owner.signer.pub", status=1).stdout


@pytest.mark.usefixtures("model")
def test_a_folder_that_does_not_open_is_refused_before_the_first_row(cli):
    cli("keygen other.key")
    assert "was not given" in cli.error("qualify sealed --key other.key")
    assert "nowhere" in cli.error("qualify nowhere --key owner.key")
    for option in ("--policy", "--anchor", "--collateral"):
        assert "nowhere" in cli.error(f"qualify sealed --key owner.key {option} nowhere", status=6)
    for line in ("--anchor owner.key", "--collateral owner.key"):
        assert "owner.key" in cli.error(f"qualify sealed --key owner.key {line}", status=6)
    for line in (
        "qualify",
        "qualify sealed --sign owner.signer",
        "qualify --verify record",
        "qualify sealed --owner x",
    ):
        cli.error(line, status=2)
    cli.error("qualify sealed --key owner.key --out owner.key --sign owner.signer")


# Faults. Each takes one check out of a copy of the package, and one row has to notice.

NEVER = "if False:"
FAULTS = {
    "two shards swapped": (
        "_sets/entries.py",
        "        if file.file_id != self.file:\n",
        "        return\n        if 1:\n",
    ),
    "a shard missing": ("_sets/folder.py", "except FileNotFoundError:", "except ZeroDivisionError:"),
    "a shard cut short": ("_sealed/file_header.py", "if size is not None and stop != size:", NEVER),
    "a bit in its last chunk": ("_transfer/channel.py", "elif (bad := operation.result()) is not None:", "elif False:"),
    "configuration altered": ("_sets/entries.py", "if sha256_of(content) != self.sha256:", NEVER),
    "older than the anchor": ("_sets/anchor.py", "elif gap < 0:", "elif False:"),
    "a key that others may use": ("_keys/keys.py", 'if os.name == "posix" and is_shared and', "if False and"),
    "an expired grant": ("_keys/grants.py", "if grants.expires is not None and now >= grants.expires:", NEVER),
    "files a server would miss": ("_models/mounts.py", "        for name in opened:\n", "        for name in ():\n"),
    "a full file system": ("_util/new_folder.py", "        except BaseException:\n", "        except TypeError:\n"),
    "an offer replayed": ("attest/_broker/ledger.py", "elif row[1] is not None:", "elif False:"),
    "another measurement": ("attest/_policy_common.py", "if found not in allowed:", NEVER),
    "a debug machine": ("attest/_policy_common.py", "if is_set and not allowed:", NEVER),
    "a stale challenge": ("attest/_verify_offer.py", "if now >= challenge.expires:", NEVER),
    "another challenge's proof": ("attest/_verify_offer.py", "if not compare_digest(found, wanted):", NEVER),
    "a GPU in dev-tools mode": ("_cli/proofs.py", "if mode.devtools:", NEVER),
    "a GPU that is not ready": ("_cli/proofs.py", "confidential.ready is False", "confidential.ready is None"),
    "NVLink encryption only": ("_devices/nvml.py", 'self.multi_gpu == "protected PCIe"', "self.multi_gpu"),
}
BY_DAY = {"two shards swapped", "an offer replayed"}
CHOSEN = """
import sys
from fastrack._cli import main
from fastrack_bench.qualification import rows

rows.ROWS = tuple(row for row in rows.ROWS if row[0] in ("genuine load", "under the anchor", sys.argv[1]))
sys.argv[1:2] = []
main()
"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY)) for name in FAULTS]
)
@pytest.mark.slow
def test_a_check_that_is_taken_out_fails_its_row(model, tmp_path, name):
    place, old, new = FAULTS[name]
    path = copy_tree(PACKAGE, tmp_path / "copy/fastrack") / place
    text = path.read_text()
    assert text.count(old) == 1
    words = [name, *model.split(), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "copy")}

    def run():
        done = subprocess.run(
            [sys.executable, "-P", "-c", CHOSEN, *words], env=environment, capture_output=True, check=False
        )
        return done.returncode, states(json.loads(done.stdout))[name], done

    status, state, done = run()
    assert (status, state == "FAILED") == (0, False), done
    path.write_text(text.replace(old, new))
    status, state, done = run()
    assert (status, state) == (1, "FAILED"), done


@pytest.mark.nightly
def test_without_the_right_to_a_mount_files_that_cannot_grow_stand_for_a_full_one(model, tmp_path):
    copy = copy_tree(Path(fastrack_bench.__file__).parent, tmp_path / "copy/fastrack_bench")
    path = copy / "qualification/child.py"
    path.write_text(path.read_text().replace("    except OSError:\n", "    finally:\n"))
    words = [sys.executable, "-P", "-c", CHOSEN, "a full file system", *model.split(), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "copy")}
    done = subprocess.run(words, env=environment, capture_output=True, check=False)
    row = json.loads(done.stdout)["rows"][-1]
    assert (row["state"], row["seen"]) == ("passed", "refused in files of at most 64 KiB, and nothing left"), done


# Records, to whose reader strangers may give anything.


def signed(payload, signer):
    return sign_envelope(payload, record._PAYLOAD_TYPE, [signer])


@pytest.fixture
def owner():
    return Signer.generate()


@pytest.fixture
def kept():
    """The payload of a small record."""
    row = {"number": 1, "name": "genuine load", "state": "passed", "seen": "1 file", "milliseconds": 3}
    members = {"fastrack": "0.2.0", "folder": 32 * "a", "format": 1, "issued": "2026-06-01T12:00:00Z", "key": 32 * "b"}
    return members | {"policy": None, "rows": [row]}


def write(document):
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def read(path, content, owner):
    path.write_bytes(content)
    return record.load_record(path, owner.verifier)


def test_a_record_is_read_as_it_was_written(tmp_path, owner, kept):
    found = read(tmp_path / "record", signed(write(kept), owner), owner)
    assert found.rows == (record.Result(1, "genuine load", "passed", "1 file", 3),)
    assert found.sign(owner) == signed(write(kept), owner)


def test_no_byte_of_a_record_can_be_changed(tmp_path, owner, kept):
    content = signed(write(kept), owner)
    for place in range(len(content)):
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        with pytest.raises((fastrack.FormatError, fastrack.SignatureError)):
            read(tmp_path / "record", changed, owner)
    for size in range(0, len(content), 7):
        with pytest.raises((fastrack.FormatError, fastrack.SignatureError)):
            read(tmp_path / "record", content[:size], owner)
    with pytest.raises(fastrack.SignatureError):
        read(tmp_path / "record", content, Signer.generate())


def test_a_signature_makes_no_record_of_another_document(tmp_path, owner, kept):
    row = kept["rows"][0]
    others = [
        {"rows": []},
        {"rows": [row | {"number": 2}]},
        {"rows": [row, row]},
        {"rows": [row | {"number": number + 1} for number in range(257)]},
        {"rows": [row | {"state": "Passed"}]},
        {"rows": [row | {"seen": "\x1b[2J"}]},
        {"rows": [row | {"seen": ""}]},
        {"rows": [row | {"seen": "x" * 401}]},
        {"rows": [row | {"number": True}]},
        {"rows": {"0": row}},
        {"rows": [[]]},
        {"format": 2},
        {"policy": "none"},
        {"folder": None},
        {"issued": "2026-06-01"},
        {"more": 1},
    ]
    for other in others:
        with pytest.raises(fastrack.FormatError, match="not the record of a qualification"):
            read(tmp_path / "record", signed(write(kept | other), owner), owner)
    for payload in (b"", b"{}", b"[" * 100_000, b"\xff", b"null", write(kept) + b" ", b"{" + b" " * (1 << 20) + b"}"):
        with pytest.raises(fastrack.FormatError):
            read(tmp_path / "record", signed(payload, owner), owner)
    content = sign_envelope(write(kept), "application/vnd.fastrack.manifest.v1+json", [owner])
    with pytest.raises(fastrack.FormatError, match="type"):
        read(tmp_path / "record", content, owner)


def test_garbage_is_no_record(tmp_path, owner, kept):
    choose = random.Random(1)
    content = signed(write(kept), owner)
    for _ in range(300):
        garbage = bytearray(choose.choice([content, write(kept), choose.randbytes(choose.randrange(99))]))
        for _ in range(choose.randrange(1, 9)):
            place = choose.randrange(len(garbage) + 1)
            garbage[place : place + choose.randrange(9)] = choose.choice([b"", b'"', b"{", b"\0", b"1e999", b"\\ud800"])
        with pytest.raises((fastrack.FormatError, fastrack.SignatureError)):
            read(tmp_path / "record", bytes(garbage) or b"x", owner)


# Ends: what a run has made is gone, whatever ends it.


def begin(model):
    """Start a run, and return it with its private folder once its broker has begun."""
    program = [sys.executable, "-m", "fastrack", *model.split()]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not (found := list(Path().glob(".fastrack-*.part/broker.log"))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    return process, found[0].parent


def brokers(private):
    """Return the processes that have the private folder on their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] * (str(private.name).encode() in path.read_bytes())
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_run_that_is_ended_leaves_nothing(model, number):
    process, private = begin(model)
    process.send_signal(number)
    process.communicate()
    assert process.returncode in {-signal.SIGTERM, 128 + number}
    assert not private.exists()
    await_no_broker(private)  # a signal between its start and its entry leaves its end to the kernel


def await_no_broker(private):
    end = time.monotonic() + 10
    while brokers(private):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_what_a_killed_run_left_goes_with_the_next_one(model):
    process, private = begin(model)
    process.kill()
    process.communicate()
    assert private.exists()
    await_no_broker(private)
    with private_folder(Path("sealed")) as other:
        assert not private.exists()
        assert other.stat().st_mode & 0o777 == 0o700
        with private_folder(Path("sealed")) as another:  # of a second run meanwhile
            assert other.exists()
        assert not another.exists()
    assert list(Path().glob(".fastrack-*")) == []


def test_no_folder_of_others_is_swept(tmp_path):
    (tmp_path / "sealed").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/.fastrack-qualify").touch()
    (tmp_path / ".fastrack-0123456789abcdef.part").symlink_to(tmp_path / "kept")
    (tmp_path / ".fastrack-0123456789abcdee.part").mkdir()  # which another command has begun
    with private_folder(tmp_path / "sealed"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".fastrack-0123456789abcdee.part",
        ".fastrack-0123456789abcdef.part",
        "kept",
        "sealed",
    ]
    assert (tmp_path / "kept/.fastrack-qualify").exists()


def test_plaintext_that_an_earlier_row_left_in_a_temporary_file_is_found(cli, model, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def leak(stage):
        rows._load(stage)
        (tmp_path / "leak").write_bytes(bytes(50) + stage.needles[0])
        time.sleep(0.1)  # so that it is older than what the next row makes
        return "passed", "leaked"

    table = [("a leak", leak), *(row for row in rows.ROWS if row[0] == "plaintext in files")]
    monkeypatch.setattr(rows, "ROWS", table)
    assert f"{tmp_path}/leak" in cli.json(model, status=1)["rows"][1]["seen"]


@pytest.mark.parametrize(
    ("pattern", "limit", "told"),
    [
        ("core", 0, "core dumps none;"),
        ("core", -1, "core dumps to core, with plaintext: ulimit -c 0;"),
        ("|/usr/share/apport/apport %p", 0, "core dumps to |/usr/share/apport/apport %p, with plaintext: sysctl "),
    ],
)
def test_a_limit_of_cores_does_not_bind_a_program_that_gets_them(tmp_path, monkeypatch, pattern, limit, told):
    for name, text in (("swaps", "Filename\n"), ("sys/kernel/core_pattern", f"{pattern}\n")):
        (path := tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (limit, -1))
    assert told in machine.read_kernel(None)[1]


def test_an_error_of_another_kind_does_not_pass_for_a_refusal(cli, model, monkeypatch):
    def change(_):
        raise TypeError("a defect of the row")

    monkeypatch.setattr(rows, "ROWS", [("a row", rows._refused(fastrack.RollbackError, change))])
    assert states(cli.json(model, status=1)) == {"a row": "FAILED"}
    monkeypatch.setattr(rows, "ROWS", [("a row", rows._refused(fastrack.RollbackError, lambda _: "another name"))])
    assert states(cli.json(model, status=1)) == {"a row": "FAILED"}
    error = fastrack.RollbackError
    monkeypatch.setattr(rows, "ROWS", [("a row", rows._refused(error, lambda copy: copy.flip("config.json", 1)))])
    found = cli.json(model, status=1)["rows"][0]
    assert "got AuthenticationError" in found["seen"]
