"""Mistakes in command lines: one line answers each and says what to do, and nothing is changed by it."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from helpers.commands import invoke
from helpers.tampering import flip_byte

from fastrack import Key, save_file

K = "-k owner.key"
TOO_LONG = "n" * 300
WRONG_KEY = "expected key"

# A command line, its exit status, and a part of its line on stderr that tells the mistake or the way on.
MISTAKES = [
    # Words that are not there.
    ("encrypt data.npy out", 2, "`fastrack seal`"),
    ("decrypt sealed.safetensors out.npy", 2, "`fastrack unseal`"),
    ("info sealed.safetensors", 2, "`fastrack inspect`"),
    ("sael data.npy out", 2, "`fastrack seal`"),
    ("Seal data.npy out", 2, "`fastrack seal`"),
    ("data.npy out.safetensors", 2, "which is a file"),
    ("seal-r study out", 2, "`fastrack seal`"),
    ("seal data.npy out --kye owner.key", 2, "did you mean --key?"),
    ("--quiet keygen new.key", 2, "behind the command"),
    ("seal data.npy out -key owner.key", 2, "expected two dashes, as in --key"),
    (f"seal data.npy out.safetensors {K} --overwrite", 2, "--force"),
    (f"unseal sealed.safetensors out.npy {K} --skip", 2, "--skip-existing"),
    ("keygen new.key --bits=", 2, "256"),
    ("keygen new.key extra", 2, "extra argument"),
    ("keygen --identity", 2, "PATH"),
    ("seal data.npy out --key", 2, "--key: expected a value"),
    (f"seal data.npy {K}", 2, "expected a source and a target"),
    (f"unseal sealed.safetensors {K}", 2, "expected a source and a target"),
    ("verify", 2, "FILE"),
    ("inspect", 2, "FILE"),
    ("seal", 2, "SOURCE"),
    ("seal one", 2, "expected a source and a target"),
    ("unseal one", 2, "expected a source and a target"),
    ("nonsense", 2, "no command"),
    ("demo --repeat 0", 2, "--repeat"),
    ("doctor x", 2, "expected a folder"),
    ("help sealing", 2, "`fastrack seal`"),
    ("help kyes", 2, "`fastrack help keys`"),
    ("attest verfiy offer", 2, "`fastrack attest verify`"),
    # Files that are not there, or are others.
    (f"seal dta.npy out.safetensors {K}", 6, "Did you mean data.npy?"),
    (f"seal data.npy nowhere/out {K}", 6, "make it first"),
    (f"unseal seled.safetensors out.npy {K}", 6, "Did you mean sealed.safetensors?"),
    ("inspect sealed", 6, "No such file"),
    (f"verify missing.bin {K}", 6, "error: missing.bin: No such file or directory\n"),
    ("inspect data.csv", 6, "text, such as CSV"),
    ("inspect model.pt", 6, "torch.load"),
    ("inspect photo.png", 6, "an image"),
    ("inspect data.npy", 6, "`fastrack seal` seals it"),
    ("inspect data.gz", 6, "compressed"),
    ("inspect zeros", 6, "not written whole"),
    ("inspect empty", 6, "it is empty"),
    ("inspect owner.key", 6, "safetensors file"),
    (f"verify cut.safetensors {K}", 6, "cut short"),
    (f"verify plain.safetensors {K}", 6, "`fastrack seal`"),
    (f"verify data.npy {K}", 6, "`fastrack seal` seals it"),
    (f"unseal plain.safetensors out.npy {K}", 6, "`fastrack seal`"),
    (f"unseal notes.txt out.txt {K}", 6, "safetensors file"),
    (f"seal sealed.safetensors twice.safetensors {K}", 6, "sealed already"),
    (f"unseal altered.safetensors out.npy {K}", 4, "altered"),
    (f"unseal dangling out.npy {K}", 6, "No such file"),
    (f"seal loop out.safetensors {K}", 1, "loop"),
    (f"seal pipe out.safetensors {K}", 1, "not a regular file"),
    ("inspect pipe", 1, "pipe"),
    (f"verify pipe {K}", 1, "pipe"),
    (f"unseal pipe out.npz {K}", 1, "pipe"),
    ("verify sealed.safetensors -k pipe", 5, "pipe"),
    (f"seal empty.npy out.safetensors {K}", 6, "empty.npy"),
    # Arguments that changed places.
    ("seal out.safetensors data.npy -k owner.key", 2, "got data.npy"),
    ("seal owner.key out.safetensors -k data.npy", 5, "not a fastrack key file"),
    ("unseal out.npy sealed.safetensors -k owner.key", 1, "--force"),
    ("seal data.npy owner.key", 2, "--key names a key"),
    ("seal data.npy out.safetensors owner.key", 2, "--key names a key"),
    ("keygen owner.key", 1, "left as it was"),
    ("key data.npy", 5, "not a fastrack key file"),
    ("key sealed.safetensors", 5, "not a fastrack key file"),
    # Keys.
    ("seal data.npy out.safetensors", 5, "fastrack keygen"),
    ("unseal sealed.safetensors out.npy", 5, "--key"),
    ("verify sealed.safetensors -k other.key", 5, WRONG_KEY),
    ("unseal sealed.safetensors out.npy -k other.key", 5, WRONG_KEY),
    ("verify sealed.safetensors -k onwer.key", 5, "Did you mean owner.key?"),
    ("verify sealed.safetensors -k junk.key", 5, "not a fastrack key file"),
    ("verify sealed.safetensors -k empty", 5, "not a fastrack key file"),
    ("verify sealed.safetensors -k half.key", 5, "restore it"),
    ("verify sealed.safetensors -k crlf.key", 5, "CRLF"),
    ("verify sealed.safetensors -k public.key", 5, "chmod 600 public.key"),
    ("verify sealed.safetensors -k reader", 5, "reader"),
    ("verify sealed.safetensors -k reader.pub", 5, "reader.pub"),
    ("verify sealed.safetensors -k study", 5, "study"),
    ("verify sealed.safetensors -k ''", 2, "empty text"),
    ("verify sealed.safetensors -k 0123456789abcdef0123456789abcdef", 2, "on a command line"),
    ("verify sealed.safetensors -k vault:nothing", 5, "vault"),
    ("verify sealed.safetensors -k fd:999", 1, "999"),
    ("verify - -k -", 2, "standard input once"),
    ("grant owner.key --to absent.pub --sign owner.signer", 5, "absent.pub"),
    ("grant owner.key --to reader --sign owner.signer", 5, "reader"),
    ("grant owner.key --to reader.pub", 2, "--signer"),
    ("grant owner.key --to reader.pub --sign owner.key", 5, "owner.key"),
    ("grant owner.key --sign owner.signer", 2, "--to"),
    ("grant owner.key --to reader.pub --sign owner.signer --expires tomorrow", 2, "2027-01-31"),
    ("publish sealed.safetensors", 2, "--signer"),
    ("anchor mine.anchor --owner owner.signer", 6, "owner.signer"),
    # Variables that are not set.
    (f"seal '' out.safetensors {K}", 2, "empty text"),
    (f"seal data.npy '' {K}", 2, "empty text"),
    ("keygen ''", 2, "empty text"),
    ("inspect ''", 2, "empty text"),
    (f"seal data.npy --out '' {K}", 2, "empty text"),
    ("seal data.npy out --key ''", 2, "--key"),
    ("unseal sealed.safetensors out --key ''", 2, "--key"),
    ("seal data.npy out --to ''", 2, "empty text"),
    ("seal data.npy out --to a --sign ''", 2, "empty text"),
    ("unseal sealed.safetensors out --anchor ''", 2, "empty text"),
    # A folder in the place of a file, and the reverse.
    (f"seal study study-sealed.safetensors {K}", 2, "Name a folder"),
    (f"seal data.npy notes.txt out.safetensors {K}", 2, "Name a folder"),
    (f"seal data.npy notes.txt {K}", 2, "got notes.txt"),
    (f"seal study study {K}", 1, "exists"),
    (f"seal hollow out {K}", 6, "hollow"),
    (f"seal data.npy data.npy {K}", 2, "another file"),
    (f"seal data.npy there.safetensors {K}", 1, "--force"),
    (f"seal data.npy folder.safetensors {K} --force", 1, "not a regular file"),
    ("inspect study", 6, "--recursive"),
    (f"verify study {K}", 2, "--recursive"),
    (f"unseal study out {K}", 6, "--recursive"),
    (f"seal study out {K} --name x", 2, "--name"),
    ("keygen study", 6, "study"),
    ("keygen study/new.key/x", 6, "study/new.key"),
    ("key hollow", 5, "expected keys"),
    (f"import study {K}", 2, "expected a source and a folder"),
    (f"import nothing ds {K}", 6, "nothing"),
    (f"import lines.txt notes.txt {K}", 6, "notes.txt"),
    (f"seal study study out {K}", 6, "study: expected a file, got a folder"),
    (f"rekey sealed.safetensors out.safetensors {K}", 2, "--new"),
    (f"rekey data.npy out.safetensors {K} --new other.key", 6, "data.npy"),
    # Tensors and options that are not there, or do not go together.
    (f"unseal sealed.safetensors out.npy {K} --tensor weights", 6, "'data'"),
    (f"seal data.npy out.safetensors {K} --plain labels", 2, "'data'"),
    (f"unseal sealed.safetensors out.npy {K} --expect labels", 4, "labels"),
    (f"verify sealed.safetensors {K} --file-id 00", 4, "file id"),
    (f"seal data.npy out.safetensors {K} --to reader.pub", 2, "--key or --to"),
    (f"seal data.npy out.safetensors {K} --force --skip-existing", 2, "--skip-existing"),
    (f"seal data.npy out.safetensors {K} --format npy", 2, "suffix"),
    (f"seal - out {K}", 2, ".safetensors"),
    # Names that a terminal must not see as they are.
    ("inspect 'a\nerror: b'", 6, "a\\nerror: b: No such file"),
    ("inspect 'a\x1b[2J'", 6, "a\\x1b[2J"),
    ("'a\x1b[2J' b", 2, "\\x1b[2J"),
    ("seal a b '--\x1b[2J'", 2, "\\x1b[2J"),
    (f"seal -data.npy out.safetensors {K}", 2, "./"),
    (f"seal data.npy READONLY/out.safetensors {K}", 1, "READONLY/out.safetensors: "),
    (f"seal data.npy READONLY/out {K}", 1, "READONLY/out: "),
    (f"unseal sealed.safetensors READONLY/out.npy {K}", 1, "READONLY/out.npy: "),
    (f"seal study READONLY/out {K}", 1, "READONLY"),
    ("keygen READONLY/new.key", 1, "READONLY/new.key: "),
    (f"seal data.npy {TOO_LONG}.safetensors {K}", 1, "too long"),
    (f"seal data.npy {TOO_LONG} {K}", 1, "too long"),
    (f"inspect {TOO_LONG}", 1, "too long"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with what people have in one, and with what went wrong before."""
    folder = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for made in ("owner.key", "other.key", "public.key", "reader --identity", "owner.signer --signer"):
            assert invoke(f"keygen -q {made}".split()).output == ""
        Path("public.key").chmod(0o644)
        text = Path("owner.key").read_bytes()
        for name, content in {
            "half.key": text[: len(text) // 2],
            "crlf.key": text.replace(b"\n", b"\r\n"),
            "junk.key": b"secret\n",
        }.items():
            Path(name).write_bytes(content)
            Path(name).chmod(0o600)
        np.save("data.npy", np.arange(100.0))
        Path("-data.npy").write_bytes(Path("data.npy").read_bytes())
        for name in ("study", "hollow", "folder.safetensors", "readonly"):
            Path(name).mkdir()
        Path("readonly").chmod(0o555)
        for name, content in {
            "study/a.txt": b"a",
            "lines.txt": b"one\ntwo\n",
            "notes.txt": b"not for everyone, and long enough\n",
            "data.csv": b'"patient",age\n1,44\n',
            "model.pt": b"PK\x03\x04\x00\x00\x08\x08" + bytes(40),
            "photo.png": b"\x89PNG\r\n\x1a\n" + bytes(40),
            "data.gz": b"\x1f\x8b\x08\x08" + b"\xff" * 40,
            "zeros": bytes(40),
            "big.bin": bytes(200_000),
            **dict.fromkeys(("empty", "empty.npy", "there.safetensors"), b""),
        }.items():
            Path(name).write_bytes(content)
        owner = Key.load("owner.key")
        for name in ("sealed", "altered", "cut"):
            save_file({"data": np.arange(100.0)}, f"{name}.safetensors", owner)
        save_file({"data": np.zeros(200_000, np.uint8)}, "big.safetensors", owner)
        flip_byte(Path("altered.safetensors"))
        os.truncate("cut.safetensors", 600)
        safetensors.numpy.save_file({"data": np.arange(4)}, "plain.safetensors")
        Path("dangling").symlink_to("nothing")
        Path("loop").symlink_to("loop")
        os.mkfifo("pipe")
    return folder


@pytest.fixture
def place(prepared, monkeypatch):
    """The folder, in which nothing has changed at the end."""
    monkeypatch.chdir(prepared)
    before = contents(prepared)
    yield prepared
    assert contents(prepared) == before


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))
    }


def start(*line, **options):
    """Start a command in a process of its own, with signals as in a terminal."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FASTRACK_KEY_FILE": "owner.key"}

    def default():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment} | options
    return subprocess.Popen([sys.executable, "-m", "fastrack", *line], preexec_fn=default, **options)  # noqa: PLW1509


def finish(*line, **options):
    with start(*line, **options) as process:
        _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_there_are_many():
    assert len(MISTAKES) > 120
    assert len({line for line, _, _ in MISTAKES}) == len(MISTAKES)


def test_each_is_answered_in_one_line_and_changes_nothing(place):
    readonly = "/sys" if os.geteuid() == 0 else "readonly"  # what root may not write either
    wrong = {}
    for line, status, told in MISTAKES:
        words = [word.replace("READONLY", readonly) for word in shlex.split(line)]
        result = invoke(words, b"")
        said = result.stderr
        is_one_line = said.startswith("error: ") and said.count("\n") == 1 and said[:-1].isprintable()
        is_known = told.replace("READONLY", readonly) in said and "Traceback" not in said
        if not (is_one_line and is_known and result.exit_code == status and result.stdout.count("\n") <= 1):
            wrong[line] = (result.exit_code, said)
        assert not any(name.name.startswith(("out", "new", ".fastrack")) for name in place.iterdir()), line
    assert wrong == {}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("variable", "value", "status", "told"),
    [
        ("FASTRACK_KEY_FILE", "", 5, "name a key file with --key or FASTRACK_KEY_FILE"),
        ("FASTRACK_KEY_FILE", "onwer.key", 5, "Did you mean owner.key?"),
        ("FASTRACK_KEY_FILE", "0123456789abcdef" * 4, 5, "looks like a key itself"),
        ("FASTRACK_KEY_MODE", "rw", 5, "FASTRACK_KEY_MODE"),
    ],
)
def test_a_variable_is_named_in_the_line(monkeypatch, variable, value, status, told):
    monkeypatch.setenv("FASTRACK_KEY_FILE", "owner.key")
    monkeypatch.setenv(variable, value)
    result = invoke(["verify", "sealed.safetensors"])
    assert (result.exit_code, result.stdout) == (status, "")
    assert told in result.stderr
    assert "0123456789abcdef" not in result.stderr
    first, *notes = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert notes in ([], ["note: it came from FASTRACK_KEY_FILE"])


@pytest.mark.usefixtures("place")
@pytest.mark.slow
def test_a_host_engine_that_there_is_not_is_named_with_its_variable(monkeypatch):
    monkeypatch.setenv("FASTRACK_ENGINE", "fast")
    code, said = finish("verify", "sealed.safetensors")
    assert (code, said.count(b"\n")) == (7, 1)
    assert b"FASTRACK_ENGINE" in said


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("line", "status", "told"),
    [
        ((b"inspect", b"no\xff.safetensors"), 6, b"no\\udcff.safetensors: No such file"),
        ((b"seal", b"no\xff.npy", b"out"), 6, b"no\\udcff.npy: No such file"),
        ((b"no\xff",), 2, b"no command"),
    ],
)
@pytest.mark.slow
def test_a_name_that_is_not_in_utf_8_is_told_escaped(line, status, told):
    code, said = finish(*line)
    assert (code, said.count(b"\n")) == (status, 1)
    assert told in said


def test_a_file_whose_name_is_not_in_utf_8_is_named(tmp_path, monkeypatch, prepared):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"no\xff.txt")
    Path(name).write_bytes(b"text")
    for target in ("out", "out.safetensors"):
        result = invoke(["seal", name, target, "-k", str(prepared / "owner.key")])
        assert (result.exit_code, result.stderr.count("\n")) == (6, 1)
        assert "no\\udcff.txt: expected a name in UTF-8" in result.stderr
        assert "--name" in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    assert invoke(["seal", name, "out.safetensors", "--name", "x", "-k", str(prepared / "owner.key")]).exit_code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_an_output_that_ends_or_is_full_or_closed_is_told_at_most_once():
    read, write = os.pipe()
    os.close(read)
    assert finish("key", "owner.key", stdout=write) == (141, b"")  # as of a program that a closed pipe ends
    os.close(write)
    for line in ("key owner.key", "help keys", "inspect sealed.safetensors", "unseal sealed.safetensors -"):
        with Path("/dev/full").open("wb") as full:
            code, said = finish(*line.split(), stdout=full)
        assert (code, said.count(b"\n")) == (1, 1), line
        assert b"No space left" in said
    command = f"exec {sys.executable} -m fastrack keygen new.key >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b"/dev/null" in done.stderr


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGINT, 130, b"interrupted"), (signal.SIGTERM, 143, b"terminated")],
)
@pytest.mark.usefixtures("place")
@pytest.mark.nightly
def test_work_on_many_files_that_is_ended_tells_how_to_go_on(tmp_path, number, status, word):
    count, target = 2_000, tmp_path / "out"
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "0.txt").write_bytes(b"text")
    for index in range(1, count):
        os.link(tmp_path / "many" / "0.txt", tmp_path / "many" / f"{index}.txt")
    line = ("seal", "-r", str(tmp_path / "many"), str(target))
    with start(*line) as process:
        while process.poll() is None and not (target.is_dir() and len(list(target.iterdir())) > 20):
            time.sleep(0.001)
        process.send_signal(number)
        out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (status, b"")
    told = rb"error: %b: ([\d,]+) of 2,000 files sealed into (.*)\. Run it again with --skip-existing to go on\n"
    match = re.fullmatch(told % word, said)
    assert match is not None, said
    done = int(match[1].replace(b",", b""))
    left = [path for path in target.iterdir() if path.suffix != ".safetensors"]
    assert (left, 0 <= len(list(target.iterdir())) - done <= 1) == ([], True)
    sealed = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    result = invoke([*line, "--skip-existing", "-k", "owner.key"])
    assert (result.exit_code, len(list(target.iterdir()))) == (0, count)
    assert f"left as they are: {len(sealed)} files" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in sealed} == sealed


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("verify 'MANY/*'", marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("seal -r MANY out", "inspect 'MANY/*'")),
    ],
)
def test_ten_thousand_errors_of_one_kind_are_counted(place, tmp_path, line):
    os.link(place / "empty.npy", tmp_path / "0.npy")
    for index in range(1, 10_000):
        os.link(tmp_path / "0.npy", tmp_path / f"{index}.npy")
    words = [word.replace("MANY", str(tmp_path)) for word in shlex.split(line)]
    result = invoke([*words, *([] if "inspect" in line else ["-k", "owner.key"])])
    assert result.exit_code == 6
    lines = result.stderr.splitlines()
    assert (len(lines), sum("/0.npy" in line for line in lines)) == (4, 1)
    assert "9,997 more" in lines[3]
    assert result.stdout.count("\n") == 1
