"""No message tells a key, a password of a URL, or values of a tensor, whatever argument they were given as."""

import base64
import json
import os
import shutil
import subprocess
import sys
import traceback
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from helpers import local_machine
from helpers.commands import invoke
from helpers.foundry.machine import Machine, policy
from helpers.signed import GRANTS, sign

import fastrack
from fastrack import Anchor, Key, KeyRing, SealedDataset, attest, grants, providers, tour
from fastrack._util.shown import shown
from fastrack.grants import Identity, Signer

torch = pytest.importorskip("torch")

SECRET = bytes(range(101, 133))
BASE64 = base64.urlsafe_b64encode(SECRET).decode().rstrip("=")
PASSWORD, QUERY, VALUE = "pa55w0rd", "s1gnature", 71234.5
TOLD = [SECRET.hex(), SECRET.hex()[:20], BASE64[:20], PASSWORD, QUERY, "71234"]
KEY = Key.generate()

HOSTILE = {
    "hex": SECRET.hex(),
    "key=hex": f"key={SECRET.hex()}",
    "hex:hex": f"hex:{SECRET.hex()}",
    "/hex": f"/{SECRET.hex()}",
    "two": f"{SECRET.hex()},{SECRET.hex()}",
    "JWK": f'{{"kty":"oct","k":"{BASE64}"}}',
    "line": f"fastrack-key-1:{SECRET.hex()}",
    "path of hex": Path(SECRET.hex()),
    "URL": f"http://user:{PASSWORD}@127.0.0.1:9/a.safetensors?sig={QUERY}",
    "URL with a slash": f"http://user:12/{PASSWORD}@127.0.0.1:9/a.safetensors?sig={QUERY}",
    "path of a URL": Path(f"http://user:{PASSWORD}@127.0.0.1:9/a.safetensors?sig={QUERY}"),
    "tensor": torch.full((3,), VALUE),
    "array": np.full(3, VALUE),
    "scalar": np.float64(VALUE),
    "list": [VALUE, VALUE],
    "dict": {"a": torch.full((3,), VALUE)},
}


class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def calls():
    """Return each public function with arguments that it takes."""
    np.save("plain.npy", np.arange(4))
    fastrack.save_file({"x": np.arange(4), "y": np.arange(4)}, "x.safetensors", KEY, plain=["y"])
    fastrack.save_model(Model(), "model.safetensors", KEY)
    fastrack.save_checkpoint("state.safetensors", {"step": 1}, KEY)
    fastrack.publish("x.safetensors", signer=(owner := Signer.generate()))
    Anchor.create("x.anchor", owner=owner.verifier)
    Path("folder").mkdir()
    np.save("folder/plain.npy", np.arange(4))
    fastrack.seal_folder("folder", "sealed", KEY)
    handle, file = fastrack.seal(np.arange(4), KEY), fastrack.load_file("x.safetensors")
    recipient = Identity.generate().recipient
    key, keys, named = {"key": KEY}, {"keys": KEY}, {"name": "x", "metadata": {"a": "b"}}
    placed = {"device": "cpu", **keys}
    of_objects = {
        "Key.save": KEY.save,
        "SealedDataset[]": SealedDataset("x.safetensors", ["x"], keys=KEY).__getitem__,
        "SealedTensor[]": handle.__getitem__,
        "SealedTensor.to": handle.to,
        "SealedFile[]": file.__getitem__,
        "SealedFile.plain[]": file.plain.__getitem__,
        "wrap": lambda **given: list(fastrack.wrap(**given)),
    }
    given = {
        "Anchor": {"path": "x.anchor"},
        "Anchor.create": {"path": "other.anchor", "owner": owner.verifier, "lineage": "0" * 32},
        "Channel": {**placed, "threads": 1, "share": 1.0},
        "KeyRing": {**keys, "ttl": 1.0},
        "Key.load": {"path": "no.key"},
        "Key.generate": {"bits": 256},
        "Key.from_text": {"text": "text"},
        "Key.save": {"path": "some.key"},
        "SealedDataset": {"paths": "x.safetensors", "columns": ["x"], **keys, "plain_columns": ["y"]},
        "SealedDataset[]": {"index": 0},
        "DatasetWriter": {"folder": "samples", **key, "records": ["r"], "shard_size": 8},
        "SealedTensor[]": {"index": 0},
        "SealedTensor.to": {"device": "cpu", "dtype": "int64"},
        "SealedFile[]": {"name": "x"},
        "SealedFile.plain[]": {"name": "y"},
        "import_samples": {"source": "none", "folder": "imported", **key},
        "load_checkpoint": {"path": "state.safetensors", **placed},
        "load_file": {"path": "x.safetensors", "file_id": file.file_id, "anchor": "x.anchor"},
        "load_folder": {"path": "sealed", **keys, "anchor": "x.anchor"},
        "load_manifest": {"path": "x.safetensors.manifest", "owner": owner.verifier},
        "load_model": {"module": Model(), "path": "model.safetensors", **placed},
        "load_tensors": {"path": "model.safetensors", **placed, "framework": "numpy", "dtype": "float32"},
        "open_bytes": {"sealed": handle, **keys},
        "publish": {"paths": "x.safetensors", "signer": owner, "manifest": "x.m", "anchor": "x.anchor"},
        "rekey_file": {"source": "x.safetensors", "target": "r.safetensors", **keys, **key, "plain": ["y"]},
        "safe_open": {"filename": "model.safetensors", "framework": "pt", **placed},
        "save_checkpoint": {"path": "c.safetensors", "state": {"step": 1}, **key},
        "save_file": {"tensors": {"x": np.arange(3)}, "path": "s.safetensors", **key, "plain": [], "metadata": {}},
        "save_model": {"module": Model(), "path": "m.safetensors", **key, "metadata": {"a": "b"}},
        "seal": {"tensor": np.arange(3), **key, "name": "x"},
        "seal_file": {"source": "plain.npy", "target": "t.safetensors", **key, "plain": [], **named},
        "seal_folder": {"source": "folder", "target": "again", **key},
        "synchronize": {"device": "cpu"},
        "to_device": {"obj": handle, **placed, "framework": "numpy", "out": None, "dtype": "int64"},
        "to_host": {"x": np.arange(3), **key, "name": "x"},
        "unseal": {"sealed": handle, **keys, "framework": "numpy"},
        "unseal_file": {"source": "x.safetensors", "target": "u.safetensors", **keys, "names": ["x"], "plain": ["y"]},
        "unseal_folder": {"source": "sealed", "target": "unsealed", **keys, "anchor": "x.anchor"},
        "verify_file": {"source": "x.safetensors", **keys},
        "wrap": {"loader": [handle], **placed, "prefetch": 2},
        "Grants.load": {"path": "x.grants", "owner": owner.verifier},
        "Grants.issue": {
            **key,
            "recipients": [recipient],
            "signer": owner,
            "files": ["0" * 32],
            "lineage": "0" * 32,
            "least_version": 1,
        },
        "Identity.load": {"path": "x"},
        "Identity.generate": {"algorithm": "P-384", "name": "alice"},
        "Signer.load": {"path": "x"},
        "Signer.generate": {"algorithm": "Ed25519", "name": "alice"},
        "Recipient.load": {"path": "x"},
        "Recipient.parse": {"text": "x"},
        "Verifier.load": {"path": "x"},
        "WrappedKey.load": {"path": "x"},
        "open_wrapper": {"uri": "tpm:"},
        "fetch_keys": {"url": "http://127.0.0.1:1", "owner": owner.verifier, "ca": None},
        "Policy.from_toml": {"source": Path("none.toml")},
        "TdxCollateral.from_json": {"text": "{}"},
        "Challenge.from_bytes": {"data": b"{}"},
        "AwsKms": {"key": "alias/x"},
        "AzureKeyVault": {"key": "https://x.vault.azure.net/keys/x/y"},
        "GcpKms": {"key": "projects/a/locations/b/keyRings/c/cryptoKeys/d"},
        "Pkcs11": {"uri": "pkcs11:token=T;object=O"},
        "Tpm": {"pcrs": "sha256:0"},
        "VaultTransit": {"mount": "transit", "name": "x"},
    }
    return {name: (of_objects.get(name) or public(name), arguments) for name, arguments in given.items()}


def public(name):
    """Return a public function, of whichever package has its name."""
    (home, *_) = [each for each in (fastrack, grants, attest, providers) if name.partition(".")[0] in each.__all__]
    return attrgetter(name)(home)


@pytest.fixture
def folder(tmp_path, monkeypatch, limited):
    monkeypatch.chdir(tmp_path)
    limited(first_delay=1e-3)  # seconds before a server is asked again
    return tmp_path


def told_by(error):
    text = "".join(traceback.format_exception(error)) + repr(error)
    return [part for part in TOLD if part.lower() in text.lower()]


def attempts():
    for name, (function, given) in calls().items():
        for parameter in given:
            for kind, hostile in HOSTILE.items():
                before = set(Path().iterdir())
                yield f"{name}({parameter}={kind})", function, {**given, parameter: hostile}
                for made in set(Path().iterdir()) - before:
                    shutil.rmtree(made) if made.is_dir() else made.unlink()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_no_error_of_a_public_function_repeats_a_secret():
    told = {}
    for label, function, given in attempts():
        try:
            function(**given)
        except Exception as error:  # noqa: BLE001 - whatever it is, it tells nothing
            if (found := told_by(error)) and label != "Channel(share=scalar)":  # a number is what it takes
                told[label] = (found, type(error), str(error)[:150])
    assert not told, "\n".join(f"{label}: {text}" for label, text in told.items())


BROKER = "--policy policy.toml --signer owner.signer --key some.key"
ATTEST = "--challenge challenge --policy policy.toml --sign owner.signer --key some.key"
PLAN = "--train json.tool:main --signer owner.signer"
HOLD = f"--owner owner.pub {BROKER} --database new.db --insecure-loopback"
COMMANDS = {
    "inspect": "inspect {}",
    "verify": "verify {}",
    "unseal": "unseal {} back.npz --key some.key",
    "unseal, target": "unseal x.safetensors {} --key some.key",
    "seal": "seal {} new.safetensors --key some.key",
    "seal, target": "seal plain.npy {} --key some.key",
    "key": "key {}",
    "keygen": "keygen {}",
    "publish": "publish {} --sign owner.signer",
    "anchor": "anchor {}",
    "grant": "grant {}",
    "import": "import {} imported --key some.key",
    "verify, key": "verify x.safetensors --key {}",
    "verify, anchor": "verify x.safetensors --key some.key --anchor {}",
    "keygen, provider": "keygen new.wrapped --wrap {}",
    "unseal, key": "unseal x.safetensors back.npz --key {}",
    "rekey": "rekey {} new.safetensors --key some.key --new some.key",
    "rekey, new key": "rekey x.safetensors new.safetensors --key some.key --new {}",
    "grant, to": "grant some.key --to {} --sign owner.signer",
    "grant, sign": "grant some.key --to some.pub --sign {}",
    "publish, sign": "publish x.safetensors --sign {}",
    "anchor, owner": "anchor new.anchor --owner {}",
    "attest show": "attest show {}",
    "attest challenge": "attest challenge {}",
    "attest collect": "attest collect {} offer",
    "attest collect, target": "attest collect challenge {}",
    "attest collect, owner": "attest collect challenge offer --grants grants --out new.key --owner {}",
    "attest collect, key": "attest collect challenge offer --grants grants --out {} --owner owner.pub",
    "attest collect, grants": "attest collect challenge offer --grants {} --out new.key --owner owner.pub --wait 1s",
    "attest verify": "attest verify {} --challenge challenge --policy policy.toml",
    "attest verify, challenge": "attest verify offer --challenge {} --policy policy.toml",
    "attest verify, policy": "attest verify offer --challenge challenge --policy {}",
    "attest verify, collateral": "attest verify offer --challenge challenge --policy policy.toml --collateral {}",
    "attest grant": "attest grant {} --challenge challenge --policy policy.toml --sign owner.signer --key some.key",
    "attest grant, sign": "attest grant offer --challenge challenge --policy policy.toml --sign {} --key some.key",
    "attest grant, key": "attest grant offer --challenge challenge --policy policy.toml --sign owner.signer --key {}",
    "attest grant, file": f"attest grant offer {ATTEST} --file-id {{}}",
    "attest grant, target": f"attest grant offer {ATTEST} --out {{}}",
    "broker log": "broker log --database {}",
    "broker machines": "broker machines --database {}",
    "broker quarantine": "broker quarantine {} --database broker.db --why x",
    "broker lift": "broker lift {} --database broker.db --why x",
    "broker serve, policy": "broker serve --policy {} --signer owner.signer --database new.db --insecure-loopback",
    "broker serve, signer": "broker serve --policy policy.toml --signer {} --database new.db --insecure-loopback",
    "broker serve, database": f"broker serve {BROKER} --database {{}} --insecure-loopback",
    "broker serve, TLS": f"broker serve {BROKER} --database new.db --certificate {{}} --private-key {{}}",
    "tour plan": f"tour plan {{}} new {PLAN} --holder a=owner.pub --order a",
    "tour plan, holder": f"tour plan model.safetensors new {PLAN} --holder {{}} --order a",
    "tour plan, holder's key": f"tour plan model.safetensors new {PLAN} --holder a={{}} --order a",
    "tour plan, order": f"tour plan model.safetensors new {PLAN} --holder a=owner.pub --order {{}}",
    "tour own": f"tour own {{}} {BROKER} --database new.db --insecure-loopback",
    "tour own, database": f"tour own tour {BROKER} --database {{}} --insecure-loopback",
    "tour hold, digest": f"tour hold tour {HOLD} --plan-digest {{}} --data x.safetensors",
    "tour hold, data": f"tour hold tour {HOLD} --plan-digest {'0' * 64} --data {{}}",
    "tour stop": "tour stop --database {} --why asked",
    "tour run": "tour run {} out --config run.toml",
    "tour run, config": "tour run tour out --config {}",
    "tour verify": "tour verify {} --owner owner.pub",
    "tour verify, digest": "tour verify tour --owner owner.pub --plan-digest {}",
    "tour verify, model": "tour verify tour --owner owner.pub --partial --model {}",
    "tour verify, database": "tour verify tour --owner owner.pub --partial --database {}",
    "tour key": "tour key tour {} --owner owner.signer.pub --key some.key",
    "tour key, owner": "tour key tour new.key --owner {} --key some.key",
}


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_repeats_a_secret(name, monkeypatch):

    KEY.save("some.key")
    np.save("plain.npy", np.arange(4))
    fastrack.save_file({"x": np.arange(4)}, "x.safetensors", KEY)
    owner = Signer.generate()
    owner.save("owner.signer")
    owner.verifier.save("owner.pub")
    Path("policy.toml").write_text(policy(0))
    if name.startswith("tour"):
        fastrack.save_checkpoint("model.safetensors", {"model": {}}, key=KEY)
        fastrack.publish("model.safetensors", signer=owner)
        assert invoke(f"tour plan model.safetensors tour {PLAN} --holder a=owner.pub --order a".split()).exit_code == 0
        tour.TourLedger("tour.db").close()
    if name.startswith(("broker", "tour")):
        server = pytest.importorskip("fastrack._service.server").uvicorn.Server
        monkeypatch.setattr(server, "run", lambda *_, **__: None)
    if name.startswith("attest"):
        machine = Machine("tdx", 0)
        local_machine.replace(monkeypatch, lambda binding, **_: machine.collect(binding))
        for made in ("attest challenge challenge", "attest collect challenge offer"):
            assert invoke(made.split()).exit_code == 0
    for kind in ("hex", "key=hex", "/hex", "URL", "URL with a slash"):
        done = invoke([part.format(HOSTILE[kind]) for part in COMMANDS[name].split()])
        text = "".join(done.output.split()).replace("│", "").lower()
        assert not [part for part in TOLD if part.lower() in text], (kind, done.output)


def test_names_are_told_by_their_type_and_ids_as_they_are():
    assert shown(torch.ones(3)) == "an object of type Tensor"
    assert shown("layer.0.weight") == "'layer.0.weight'"
    assert shown([]) == "[]"
    assert shown("0" * 32, may_be_id=True) == repr("0" * 32)
    for path in (f"blobs/{'0a' * 32}", f"{'0a' * 32}.safetensors", f"model-{'0a' * 32}", "a/b/c"):
        assert shown(path, 200) == repr(path)


def test_a_ring_that_was_not_made_can_be_shown():
    made = []

    class Ring(KeyRing):
        def __new__(cls, *_):
            made.append(super().__new__(cls))
            return made[-1]

    with pytest.raises(TypeError):
        Ring(b"bytes")
    assert repr(made[0]) == "<KeyRing empty>"


@pytest.mark.parametrize("kind", [Key, Signer, Identity])
def test_a_damaged_key_file_is_called_damaged(kind, folder):
    path = folder / "some.key"
    kind.generate().save(path)
    content = path.read_bytes()
    for damaged in (content.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + content, content[:-5], content[:20]):
        path.write_bytes(damaged)
        with pytest.raises(fastrack.FormatError, match=r"some\.key is (a )?damaged"):
            kind.load(path)
    path.write_bytes(b"something else")
    with pytest.raises(fastrack.FormatError, match="is not a fastrack"):
        kind.load(path)


def test_names_that_a_terminal_cannot_show_end_no_command(folder):
    fastrack.save_file({"größe": np.arange(3)}, folder / "x.safetensors", KEY)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(fastrack.__file__).parents[1])}
    command = [sys.executable, "-m", "fastrack", "inspect", "x.safetensors"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert b"gr\\xf6\\xdfe" in done.stdout


def test_a_grants_file_and_names_of_files_move_no_cursor(folder):

    KEY.save("some.key")
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "\x1b[2K").touch()
    entry = {"algorithm": "P-384\x1b[2K", "ciphertext": "eA==", "id": "1" * 32, "name": "alice"}
    document = {"bits": 256, "issued": "2026-01-01T00:00:00Z", "key": "a" * 32, "recipients": [entry], "version": 1}
    document |= {"expires": None, "files": None, "lineage": None, "least_version": 0, "serial": 1}
    payload = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    (folder / "x.grants").write_bytes(sign(payload, GRANTS, Signer.generate()))
    for command in (
        ["grant", "x.grants"],
        ["verify", "x\x1b[2K", "--key", "\x1b[2K"],
        ["seal", "one/\x1b[2K", "two/\x1b[2K", "out", "--key", "some.key"],  # refused as bad usage, with both names
    ):
        output = invoke(command).output
        assert "\x1b[2K" not in output
        assert r"\x1b[2K" in output
