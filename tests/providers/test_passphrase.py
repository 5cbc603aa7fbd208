"""Key files under a passphrase: their form, its cost, and where the passphrase comes from."""

import base64
import hashlib
import json
import multiprocessing
import os
import pickle
import pty
import signal
import stat
import subprocess
import sys
import threading
import time
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from helpers.cases import each
from helpers.commands import invoke

import fastrack
from fastrack._documents import canonical as documents
from fastrack._keys import recipients
from fastrack.errors import FormatError, KeyPermissionError, ProviderError
from fastrack.providers import Passphrase, WrappedKey, _passphrase, open_wrapper

TEXT = "correct horse battery staple"
SECRET = bytes(range(32))
# By argon2-cffi 25.1 and PyCryptodome 3.23, under "pässwort mit Leerzeichen".
FILE = (
    b'{"algorithm":"Argon2id-AES-256-GCM","bits":256,"ciphertext":"wY7cyh6SiJC0qf1T8s32q1vbzdh8a+bIHx2OvkwKfiQvp2F9GLwM'
    b'ugxGNbmNPqg4","key":"8f3233434995c109659daf5a7343db0b","parameters":{"iterations":"3","lanes":"4","memory":"65536",'
    b'"salt":"ZGVmZ2hpamtsbW5vcHFycw=="},"provider":"passphrase","version":1}\n'
)
OTHER = "pässwort mit Leerzeichen"


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(_passphrase, "_unlocked", {})
    monkeypatch.delenv(_passphrase.VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Derive keys by SHA-256, but for tests of the derivation, which ask for `_genuine`. Return the derivations."""
    calls = []

    def derive(**costs):
        def into(given, out):
            calls.append(costs)
            out[:] = hashlib.sha256(repr(sorted(costs.items())).encode() + given).digest()

        return SimpleNamespace(derive_into=into)

    if "_genuine" not in request.fixturenames:
        monkeypatch.setattr(recipients, "Argon2id", derive)
    return calls


@pytest.fixture
def _genuine():
    """Derive keys as users do."""


@pytest.fixture
def typed(monkeypatch):
    """Have a terminal at which the passphrases of a list are typed. Return the list, and what it was asked.

    Nothing is typed before `may_type` is set, as it is at first.
    """
    there = SimpleNamespace(texts=[TEXT], asked=[], may_type=threading.Event())
    there.may_type.set()

    def ask(prompt):
        there.may_type.wait(30)
        there.asked.append(prompt)
        return there.texts[min(len(there.asked), len(there.texts)) - 1]

    monkeypatch.setattr(_passphrase, "ask", ask)
    return there


def changed(**members):
    document = json.loads(FILE)
    parameters = document["parameters"] | members.pop("parameters", {})
    document |= {**members, "parameters": {name: value for name, value in parameters.items() if value is not None}}
    return documents.encode(document, end=b"\n")


@pytest.mark.usefixtures("_genuine")
def test_a_file_of_another_implementation_opens(tmp_path):
    path = tmp_path / "owner.key.wrapped"
    path.write_bytes(FILE)
    key = WrappedKey.load(path).unwrap(Passphrase(OTHER))
    assert bytes(key.material()) == SECRET


@pytest.mark.slow
@pytest.mark.usefixtures("_genuine")
def test_another_implementation_opens_a_file(key):
    wrapped = Passphrase(TEXT).wrap(key)
    document = json.loads(wrapped.to_bytes())
    read = base64.b64decode
    costs = document["parameters"]
    derived = Argon2id(
        salt=read(costs["salt"]),
        length=32,
        iterations=int(costs["iterations"]),
        lanes=int(costs["lanes"]),
        memory_cost=int(costs["memory"]),
    ).derive(TEXT.encode())
    about = f"fastrack-key:{document['key']}".encode()
    secret = AESGCM(derived).decrypt(bytes(12), read(document["ciphertext"]), about)
    assert secret == bytes(key.material())
    assert (document["provider"], document["algorithm"]) == ("passphrase", "Argon2id-AES-256-GCM")


@pytest.mark.usefixtures("_genuine")
def test_the_derivation_is_that_of_rfc_9106():
    text = (resources.files("cryptography_vectors") / "KDF/argon2id.txt").read_text()
    cases = [dict(line.split(" = ") for line in case.splitlines() if " = " in line) for case in text.split("\n\n")]
    cases = [case for case in cases if int(case.get("memcost", 1 << 20)) <= 1024 and "output" in case]
    assert len(cases) > 1
    for case in cases:
        salt, given, secret, ad = (bytes.fromhex(case.get(name, "")) for name in ("salt", "pass", "secret", "ad"))
        costs = {"iterations": int(case["iter"]), "lanes": int(case["lanes"]), "memory_cost": int(case["memcost"])}
        more = {"secret": secret or None, "ad": ad or None}
        derived = recipients.Argon2id(salt=salt, length=int(case["length"]), **costs, **more).derive(given)
        assert derived.hex() == case["output"], case


@each(
    "parameters",
    [
        {"memory": str(1 << 20)},
        {"memory": "349526"},
        {"iterations": "17"},
        {"memory": "65535"},
        {"iterations": "2"},
        {"lanes": "0"},
        {"lanes": "17"},
        {"memory": "065536"},
        {"iterations": "+3"},
        {"iterations": "3\\u0663"},
        {"memory": "1e5"},
        {"memory": "9" * 2000},
        {"salt": "AAAA"},
        {"salt": None},
        {"salt": "ZGVmZ2hpamtsbW5vcHFycx=="},
        {"threads": "4"},
    ],
    ids=[
        "memory of a gigabyte",
        "more memory than five times",
        "many iterations",
        "no memory",
        "few iterations",
        "no lane",
        "many lanes",
        "another form",
        "a sign",
        "digits of another script",
        "a power",
        "billions",
        "a short salt",
        "no salt",
        "another base64",
        "more",
    ],
)
def test_a_file_that_asks_for_other_work_is_refused_before_any(parameters, quick, typed):
    with pytest.raises(FormatError, match="is wrong"):
        WrappedKey.from_bytes(changed(parameters=parameters)).unwrap()
    assert (quick, typed.asked) == ([], [])


def test_the_most_that_a_file_may_ask_for_is_five_times_the_usual_work(quick):
    for parameters in ({"iterations": "16"}, {"memory": "349525"}):
        with pytest.raises(ProviderError, match="or the file was altered"):
            WrappedKey.from_bytes(changed(parameters=parameters)).unwrap(Passphrase(OTHER))
    assert [call["iterations"] * call["memory_cost"] <= 1 << 20 for call in quick] == [True, True]


def test_every_altered_byte_is_refused(key):
    content = Passphrase(TEXT).wrap(key).to_bytes()
    assert WrappedKey.from_bytes(content).unwrap(Passphrase(TEXT)) == key
    for index in range(len(content)):
        for flip in (1, 2, 32):
            garbage = bytearray(content)
            garbage[index] ^= flip
            with pytest.raises((FormatError, ProviderError)):
                WrappedKey.from_bytes(bytes(garbage)).unwrap(Passphrase(TEXT))
        with pytest.raises((FormatError, ProviderError)):
            WrappedKey.from_bytes(content[:index]).unwrap(Passphrase(TEXT))


def test_a_wrong_passphrase_and_an_altered_file_are_told_alike(key):
    wrapped = Passphrase(TEXT).wrap(key)
    altered = json.loads(wrapped.to_bytes())
    altered["ciphertext"] = base64.b64encode(bytes(48)).decode()
    said = set()
    for content, text in (
        (wrapped.to_bytes(), "another horse"),
        (documents.encode(altered, end=b"\n"), TEXT),
        (wrapped.to_bytes(), "half \ud800"),
    ):
        with pytest.raises(ProviderError) as failed:
            WrappedKey.from_bytes(content).unwrap(Passphrase(text))
        assert failed.value.is_refusal
        assert text not in str(failed.value)
        said.add(str(failed.value))
    assert len(said) == 1


@each(
    "given",
    [lambda: None, "", 12, lambda: b""],
    ids=["none", "empty", "number", "empty bytes"],
)
def test_what_is_no_passphrase_is_refused(given, key, quick):
    with pytest.raises(ProviderError, match="expected a passphrase as text or bytes"):
        Passphrase(given).wrap(key)
    with pytest.raises(ProviderError, match="expected a passphrase as text or bytes"):
        WrappedKey.from_bytes(FILE).unwrap(Passphrase(given))
    assert quick == []


def test_a_passphrase_is_text_bytes_or_a_function(key):
    wrapped = Passphrase(TEXT).wrap(key)
    for given in (TEXT, TEXT.encode(), lambda: TEXT, TEXT.encode):
        assert wrapped.unwrap(Passphrase(given)) == key


def test_a_passphrase_is_in_no_repr_and_no_pickle(key, typed, tmp_path):
    mine = Passphrase(TEXT)
    mine.wrap(key).save(tmp_path / "x.wrapped")
    wrapped = WrappedKey.load(tmp_path / "x.wrapped", wrapper=mine)
    dumped = pickle.dumps(wrapped)
    assert TEXT.encode() not in dumped
    assert TEXT not in repr(
        (mine, wrapped, fastrack.KeyRing(wrapped), vars(wrapped) if hasattr(wrapped, "__dict__") else 0)
    )
    assert pickle.loads(dumped).unwrap() == key
    assert len(typed.asked) == 1  # as where it was pickled it was not asked for


def test_it_is_asked_for_once_in_a_process_for_a_file(key, typed, tmp_path):
    path = tmp_path / "owner.key.wrapped"
    Passphrase(TEXT).wrap(key).save(path)
    sealed = fastrack.seal(np.arange(3), key)
    for source in (path, str(path), [path], WrappedKey.load(path), tmp_path, f"passphrase:#{path}"):
        assert fastrack.unseal(sealed, keys=source, framework="numpy").tolist() == [0, 1, 2]
    threads = [threading.Thread(target=lambda: fastrack.KeyRing(path).first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert typed.asked == [f"Passphrase of key {key.id}: "]
    other = fastrack.Key.generate()
    Passphrase(TEXT).wrap(other).save(tmp_path / "other.wrapped")
    assert fastrack.KeyRing(tmp_path / "other.wrapped").first == other
    assert len(typed.asked) == 2


def test_threads_ask_once(key, typed):
    content = Passphrase(TEXT).wrap(key).to_bytes()
    found = []
    typed.may_type.clear()
    threads = [
        threading.Thread(target=lambda: found.append(WrappedKey.from_bytes(content).unwrap() == key)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    typed.may_type.set()
    for thread in threads:
        thread.join()
    assert (found, len(typed.asked)) == ([True] * 3, 1)


def test_a_wrong_one_is_not_kept(key, typed):
    wrapped = Passphrase(TEXT).wrap(key)
    typed.texts[:] = ["another horse", TEXT]
    with pytest.raises(ProviderError):
        wrapped.unwrap()
    assert wrapped.unwrap() == key


def test_wiping_a_key_leaves_the_next_one(key, typed):
    wrapped = Passphrase(TEXT).wrap(key)
    wrapped.unwrap().wipe()
    assert wrapped.unwrap() == key
    assert len(typed.asked) == 1


@each(
    "content",
    [f"{TEXT}\n".encode(), TEXT.encode(), f"{TEXT}\nanother\n".encode(), b"\xef\xbb\xbf" + f"{TEXT}\r\n".encode()],
    ids=["a line", "no end", "more lines", "of windows"],
)
def test_a_private_file_holds_it(content, key, tmp_path, monkeypatch):
    path = tmp_path / "pass"
    path.write_bytes(content)
    path.chmod(0o600)
    monkeypatch.setenv(_passphrase.VARIABLE, str(path))
    wrapped = Passphrase().wrap(key)
    assert wrapped.unwrap() == key == wrapped.unwrap(Passphrase(TEXT))


def test_a_pipe_holds_it(key, monkeypatch):
    wrapped = Passphrase(TEXT).wrap(key)
    reading, writing = os.pipe()
    os.write(writing, TEXT.encode())
    os.close(writing)
    monkeypatch.setenv(_passphrase.VARIABLE, f"/dev/fd/{reading}")
    assert wrapped.unwrap() == wrapped.unwrap() == key
    os.close(reading)


def test_a_file_that_is_no_private_text_is_refused(key, tmp_path, monkeypatch):
    wrapped = Passphrase(TEXT).wrap(key)
    path = tmp_path / "pass"
    path.write_text(TEXT)
    path.chmod(0o644)
    monkeypatch.setenv(_passphrase.VARIABLE, str(path))
    with pytest.raises(KeyPermissionError):
        wrapped.unwrap()
    path.chmod(0o600)
    path.write_bytes(TEXT.encode("utf-16"))
    with pytest.raises(ProviderError, match="UTF-8"):
        wrapped.unwrap()
    path.write_text(1100 * "x")  # of which 1024 bytes opened what 1024 others had made
    with pytest.raises(ProviderError, match="up to 1024 bytes, got more"):
        wrapped.unwrap()
    with pytest.raises(FormatError, match="up to 1024 bytes, got more"):
        Passphrase().wrap(key)
    path.write_text(1024 * "x" + "\n")
    assert Passphrase().wrap(key).unwrap() == key
    monkeypatch.setenv(_passphrase.VARIABLE, TEXT)
    with pytest.raises(ProviderError, match="to name a file") as failed:
        wrapped.unwrap()
    assert "horse" not in str(failed.value)


def test_it_is_in_no_uri():
    with pytest.raises(ValueError, match="expected passphrase:") as failed:
        open_wrapper(f"passphrase:{TEXT}")
    assert "horse" not in str(failed.value)
    assert repr(open_wrapper("passphrase:")) == "<Passphrase>"


def test_the_file_is_private(key, tmp_path):
    Passphrase(TEXT).wrap(key).save(tmp_path / "x.wrapped")
    assert stat.S_IMODE((tmp_path / "x.wrapped").stat().st_mode) == 0o600


def run(words, status=0):
    result = invoke(words.split())
    assert result.exit_code == status, result.output
    assert "horse" not in result.output
    return result


def test_commands_make_change_and_take_away_a_passphrase(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("keygen owner.key.wrapped --passphrase")
    assert typed.asked == ["New passphrase: ", "The same again: "]
    key = WrappedKey.load("owner.key.wrapped").unwrap()
    before = (tmp_path / "owner.key.wrapped").read_bytes()
    typed.texts[:] = [*[TEXT] * len(typed.asked), *["another horse battery"] * 2]
    said = json.loads(run("key owner.key.wrapped --passphrase --json").stdout)
    assert said["keys"] == [
        {"source": "owner.key.wrapped", "id": key.id, "kind": "key wrapped by passphrase", "bits": 256}
    ]
    assert (tmp_path / "owner.key.wrapped").read_bytes() != before
    assert WrappedKey.load("owner.key.wrapped").unwrap(Passphrase("another horse battery")) == key
    assert "is left as it is: remove it" in run("key owner.key.wrapped --no-passphrase").stderr
    assert fastrack.Key.load("owner.key") == key
    assert stat.S_IMODE((tmp_path / "owner.key").stat().st_mode) == 0o600
    # Nothing that is there is replaced.
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "exists" in run("key owner.key --passphrase", 1).stderr
    assert "exists" in run("key owner.key.wrapped --no-passphrase", 1).stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == after
    (tmp_path / "owner.key.wrapped").unlink()
    run("key owner.key --passphrase")
    assert WrappedKey.load("owner.key.wrapped").unwrap() == key == fastrack.Key.load("owner.key")


@pytest.mark.usefixtures("typed")
def test_a_file_that_changes_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "owner.key.wrapped"
    run("keygen owner.key.wrapped --passphrase")
    other = Passphrase(TEXT).wrap(fastrack.Key.generate()).to_bytes()
    new = _passphrase.new_passphrase
    monkeypatch.setattr(_passphrase, "new_passphrase", lambda **given: (path.write_bytes(other), new(**given))[1])
    assert "nothing replaces" in run("key owner.key.wrapped --passphrase", 1).stderr
    assert path.read_bytes() == other


@each(
    "line,told",
    [
        ("key a.key b.key --passphrase", "one key file"),
        ("key a.key --no-passphrase", "one that has it"),
        ("key vault.wrapped --passphrase", "one that has it"),
        ("keygen c.wrapped --passphrase --wrap tpm:", "--wrap"),
        ("keygen c.wrapped --passphrase --identity", "a key pair"),
        ("keygen c.key --passphrase", "c.key.wrapped"),
        ("keygen c.wrapped --wrap passphrase:correct-horse", "private file"),
    ],
    ids=["two files", "none to take away", "of a vault", "two wrappers", "a pair", "another suffix", "in the uri"],
)
def test_a_command_that_cannot_be_meant_changes_nothing(line, told, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.key", "b.key"):
        fastrack.Key.generate().save(name)
    WrappedKey("aws-kms", "SYMMETRIC_DEFAULT", 32 * "0", 256, b"x", {"key": "owner"}).save("vault.wrapped")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert told in " ".join(run(line, 2).stderr.split())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert typed.asked == []


@each(
    "texts,told",
    [(["short"], "12 characters"), ([TEXT, TEXT.upper()], "twice")],
    ids=["short", "twice"],
)
def test_a_new_passphrase_is_long_and_typed_twice(texts, told, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed.texts[:] = texts
    typed.asked.clear()
    assert told in run("keygen a.wrapped --passphrase", 2).stderr
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_passphrase_is_one_line(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("keygen owner.key.wrapped --passphrase")
    (tmp_path / "x").write_bytes(b"x")
    typed.texts[:] = [*[TEXT] * 3]
    run("seal x x.safetensors -k owner.key.wrapped")
    _passphrase._unlocked.clear()
    typed.texts[:] = [*[TEXT] * 3, "another horse"]
    for line in ("unseal x.safetensors y", "verify x.safetensors", "seal x z.safetensors"):
        result = run(f"{line} -k owner.key.wrapped", 5)
        assert (result.stdout, len(result.stderr.splitlines())) == ("", 1), result.output
        assert "asking <Passphrase> failed: expected the passphrase of key" in result.stderr


ASK = """
import sys
from fastrack.providers import _passphrase
try:
    print(len(_passphrase.ask("Passphrase: ")))
except ValueError as error:
    print(error)
"""


def on_terminal(code, *, is_behind=False, typed=b"", limit=60):
    """Return what a program prints with a terminal of its own, or in the background of one."""
    reading, writing = os.pipe()
    process, terminal = pty.fork()
    if process == 0:
        if is_behind and (child := os.fork()):
            os.waitpid(child, os.WUNTRACED)
            os._exit(0)
        if is_behind:
            os.setpgid(0, 0)
        os.dup2(writing, 1)
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        os.execv(sys.executable, [sys.executable, "-c", code])
    os.close(writing)
    shown, deadline = b"", time.monotonic() + limit
    try:
        while typed and b": " not in shown and time.monotonic() < deadline:
            shown += os.read(terminal, 1024)
        os.write(terminal, typed)
        with os.fdopen(reading) as file:
            said = file.read()
        shown += os.read(terminal, 1024) if typed else b""
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)
    return said, shown


@pytest.mark.slow
def test_it_is_typed_unseen_on_the_terminal():
    said, shown = on_terminal(ASK, typed=f"{TEXT}\n".encode())
    assert said == f"{len(TEXT)}\n"
    assert b"Passphrase: " in shown
    assert b"horse" not in shown


@pytest.mark.slow
def test_a_job_in_the_background_is_not_stopped():
    said, _ = on_terminal(ASK, is_behind=True)
    assert "expected a terminal" in said


@pytest.mark.slow
def test_without_a_terminal_it_is_refused():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", ASK]
    for given in (b"", f"{TEXT}\n".encode()):
        done = subprocess.run(
            command, env=environment, input=given, capture_output=True, check=True, start_new_session=True, timeout=60
        )
        assert (b"expected a terminal" in done.stdout, done.stderr) == (True, b"")


def _open(content, results):
    try:
        results.put(WrappedKey.from_bytes(content).unwrap().id)
    except ProviderError as error:
        results.put(str(error))


@pytest.mark.slow
@pytest.mark.usefixtures("_genuine")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_have_what_was_opened_before_a_fork_and_never_ask(method, key, tmp_path, monkeypatch):
    content = Passphrase(TEXT).wrap(key).to_bytes()
    context = multiprocessing.get_context(method)

    def ask_worker():
        results = context.Queue()
        process = context.Process(target=_open, args=(content, results))
        process.start()
        said = results.get(timeout=60)
        process.join()
        return said

    assert "expected a terminal" in ask_worker()
    path = tmp_path / "pass"
    path.write_text(TEXT)
    path.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setenv(_passphrase.VARIABLE, str(path))
        assert WrappedKey.from_bytes(content).unwrap() == key
    assert (ask_worker() == key.id) == (method == "fork")
    monkeypatch.setenv(_passphrase.VARIABLE, str(path))
    assert ask_worker() == key.id
