"""Dry runs: they say what the command would write, check what it checks before it writes, and write nothing."""

import json
import shutil

import numpy as np
import pytest
from helpers.cases import each
from helpers.commands import invoke
from helpers.every_command import every_command

import fastrack

HAVE = {"import", "seal", "unseal", "rekey"}
SMALL = "writes one small new file from its arguments, replaces none, and shows what is in it"
SERVES = "serves until it is stopped, and records what others ask for"
REASONS = {
    "keygen": "writes one small new file of random numbers, and replaces none",
    "key": "replaces no key but by itself under another passphrase, which only the file can have",
    "grant": SMALL,
    "publish": "signs a list of what is there, as the next version, which the anchor has to see",
    "anchor": SMALL,
    "index": "writes one small sealed file, which the next run replaces",
    "attest challenge": SMALL,
    "attest collect": "asks the hardware for a fresh signature, which is the result",
    "attest fetch": "asks servers, whose answers are the result",
    "attest policy": SMALL,
    "attest grant": "spends a challenge; `attest verify` checks the same and grants nothing",
    "broker serve": SERVES,
    "broker head": SMALL,
    "broker quarantine": "writes one line of a log, which `broker lift` takes back",
    "broker lift": "writes one line of a log",
    "tour plan": SMALL,
    "tour own": SERVES,
    "tour hold": SERVES,
    "tour stop": "appends one entry to a log, once",
    "tour key": SMALL,
    "tour run": "trains, and a visit counts as begun before it does",
    "bench": "measures, and writes figures where it is asked to",
    "demo": "writes into a folder of its own",
    "plan measure": "measures, and writes one new file",
    "run": "runs a program",
    "qualify": "works on copies of links, which it removes",
    "warmup": "fills the cache of a compiler",
}
READS = {
    "key",
    "inspect",
    "verify",
    "doctor",
    "help",
    "completion",
    "attest show",
    "attest verify",
    "broker log",
    "broker compare",
    "broker machines",
    "tour verify",
}
READS |= {f"plan {name}" for name in ("transfer", "epoch", "checkpoint", "collective", "load", "validate")}
MADE = ("seconds", "gbps", "file_id", "dry_run")
LINES = {
    "a file": "seal one.npy TARGET.safetensors -k owner.key",
    "a file with more": "seal two.npz TARGET.safetensors -k owner.key --plain y --drop-metadata",
    "a named tensor": "seal one.npy TARGET.safetensors -k owner.key --name weights",
    "bytes": "seal notes.txt TARGET.safetensors -k owner.key",
    "a replaced file": "seal one.npy sealed.safetensors -k owner.key --force",
    "files": "seal one.npy notes.txt TARGET -k owner.key",
    "a tree": "seal -r study TARGET -k owner.key",
    "a folder": "seal study TARGET -k owner.key --plain a.txt",
    "a sealed file": "unseal sealed.safetensors TARGET.npz -k owner.key",
    "a tensor": "unseal sealed.safetensors TARGET.npy -k owner.key --tensor x",
    "sealed files": "unseal sealed.safetensors notes.safetensors TARGET -k owner.key",
    "a sealed tree": "unseal -r tree TARGET -k owner.key",
    "a sealed folder": "unseal folder TARGET -k owner.key",
    "a dataset": "unseal data TARGET.jsonl -k owner.key",
    "a key of a file": "rekey sealed.safetensors TARGET.safetensors -k owner.key --new other.key",
    "its own key": "rekey sealed.safetensors sealed.safetensors -k owner.key --new other.key --force",
    "a key of a dataset": "rekey data TARGET -k owner.key --new other.key",
}
FAILING = {
    "no source": "seal nope.npy TARGET.safetensors -k owner.key",
    "no key": "seal one.npy TARGET.safetensors -k nope.key",
    "a target that is there": "seal one.npy sealed.safetensors -k owner.key",
    "a folder that is there": "seal study folder -k owner.key",
    "a key as target": "seal one.npy owner.key -k owner.key",
    "a damaged array": "seal damaged.npy TARGET.safetensors -k owner.key",
    "no such tensor to leave": "seal two.npz TARGET.safetensors -k owner.key --plain z",
    "no such file to leave": "seal study TARGET -k owner.key --plain z",
    "an empty folder": "seal empty TARGET -k owner.key",
    "another key": "unseal sealed.safetensors TARGET.npz -k other.key",
    "no such tensor": "unseal sealed.safetensors TARGET.npz -k owner.key --tensor z",
    "two tensors for an array": "unseal sealed.safetensors TARGET.npy -k owner.key",
    "an altered header": "unseal altered.safetensors TARGET.npz -k owner.key",
    "a file that is there": "unseal sealed.safetensors one.npy -k owner.key --tensor x",
    "another key for a folder": "unseal folder TARGET -k other.key",
    "a column that there is not": "unseal data TARGET.csv -k owner.key --columns z",
    "another key to rekey": "rekey sealed.safetensors TARGET.safetensors -k other.key --new owner.key",
    "a rekeyed file that is there": "rekey sealed.safetensors notes.safetensors -k owner.key --new other.key",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fastrack.Key.generate().save("owner.key")
        fastrack.Key.generate().save("other.key")
        for name in ("study", "empty"):
            (folder / name).mkdir()
        for name in ("notes.txt", "study/a.txt", "study/b.bin"):
            (folder / name).write_bytes(b"some notes\n" * 10)
        np.save("one.npy", np.arange(10))
        np.savez("two.npz", x=np.arange(10), y=np.ones(3, np.float32))
        (folder / "damaged.npy").write_bytes((folder / "one.npy").read_bytes()[:-9])
        for line in (
            "seal two.npz sealed.safetensors -k owner.key",
            "seal notes.txt notes.safetensors -k owner.key",
            "seal -r study tree -k owner.key",
            "seal study folder -k owner.key",
            "import notes.txt data -k owner.key",
        ):
            assert invoke(line.split()).exit_code == 0
        altered = (folder / "sealed.safetensors").read_bytes().replace(b'"x":', b'"z":')
        (folder / "altered.safetensors").write_bytes(altered)
    return folder


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path / "work", copy_function=shutil.copy2)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def state(folder):
    """Return what is in a folder, and when it was written."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


def documents(text):
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:]
    return found


def same(value):
    """Return a document without what each run makes anew, and lists in one order."""
    if isinstance(value, dict):
        return {name: same(member) for name, member in value.items() if name not in MADE}
    return sorted(value) if isinstance(value, list) else value


def test_each_command_that_writes_has_a_dry_run_or_a_reason():
    options = {name: {opt for it in command.params for opt in it.opts} for name, command in every_command().items()}
    assert {name for name, found in options.items() if "--dry-run" in found} == HAVE
    assert options.keys() == HAVE | REASONS.keys() | READS
    assert not HAVE & REASONS.keys()


@pytest.mark.slow
@each("name", list(LINES))
def test_it_says_what_the_command_writes_and_writes_nothing(name, prepared, tmp_path, monkeypatch):
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder, copy_function=shutil.copy2)
    monkeypatch.chdir(folder)
    line, before = LINES[name].split(), state(folder)
    text = invoke([*line, "--dry-run"])
    assert (text.exit_code, text.stderr) == (0, ""), text.output
    assert "othing was written" in text.stdout
    dry = invoke([*line, "--dry-run", "--json"])
    assert (dry.exit_code, state(folder)) == (0, before), dry.output
    real = invoke([*line, "--json"])
    assert real.exit_code == 0, real.output
    told, done = documents(dry.stdout), documents(real.stdout)
    assert [document["dry_run"] for document in told] == [True] * len(done)
    assert [*map(same, told)] == [*map(same, done)]
    for document in done:
        assert document["target"] in text.stdout


@pytest.mark.slow
@each("name", list(FAILING))
def test_it_fails_as_the_command_does_before_it_writes(name, folder):
    before = state(folder)
    dry = invoke([*FAILING[name].split(), "--dry-run"])
    real = invoke(FAILING[name].split())
    assert (dry.exit_code, dry.stderr, state(folder)) == (real.exit_code, real.stderr, before)
    assert dry.exit_code


def test_nothing_is_written_by_a_few(folder):
    before = state(folder)
    for name in ("a file", "a tree", "a sealed folder", "its own key"):
        result = invoke([*LINES[name].split(), "--dry-run"])
        assert (result.exit_code, state(folder)) == (0, before), result.output
        assert "othing was written" in result.stdout
    assert invoke([*FAILING["a target that is there"].split(), "--dry-run"]).exit_code == 1
    assert state(folder) == before


def test_a_lost_report_of_a_dry_run_removes_nothing_that_was_there(folder, monkeypatch):
    (folder / "back.npz").write_bytes(b"mine")
    before = state(folder)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastrack._cli.run.print_lines", fail)
    line = "unseal sealed.safetensors back.npz -k owner.key --force --dry-run"
    assert invoke(line.split()).exit_code == 1
    assert state(folder) == before


def test_grants_are_not_written_by_a_dry_run(folder):
    for words in ("keygen reader --identity", "keygen signer --signer"):
        invoke(words.split())
    before = state(folder)
    for source in ("one.npy TARGET.safetensors", "study TARGET"):
        result = invoke(f"seal {source} --to reader.pub --sign signer --dry-run".split())
        assert (result.exit_code, state(folder)) == (0, before), result.output


@pytest.mark.usefixtures("folder")
def test_standard_input_and_output_have_no_dry_run():
    for line in (
        "seal one.npy - -k owner.key",
        "seal - x.safetensors -k owner.key",
        "unseal sealed.safetensors - -k owner.key",
        "unseal - x.npz -k owner.key",
    ):
        result = invoke([*line.split(), "--dry-run"])
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--dry-run" in result.stderr
