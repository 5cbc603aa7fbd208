"""``publish``, ``anchor``, and ``verify`` and ``unseal`` with an anchor, as an owner and a reader use them."""

import numpy as np
import pytest
from helpers.cases import each


@pytest.fixture(autouse=True)
def _keys(cli, key, folder):
    cli("keygen owner.signer --signer")
    (folder / "set").mkdir()
    (folder / "set" / "config.json").write_text("{}")
    np.savez(folder / "plain.npz", x=np.arange(9), y=np.arange(4))
    cli(f"seal plain.npz set/data.safetensors --plain y {key}")


@pytest.fixture
def published(cli):
    return cli.json("publish set --sign owner.signer")


@pytest.fixture
def anchor(cli, published):
    assert published["version"] == 1
    cli("anchor reader.anchor --owner owner.signer.pub")
    return "--anchor reader.anchor"


def test_a_set_is_published_and_followed(cli, key, published, anchor, folder):
    assert (published["path"], published["version"]) == ("set/fastrack.manifest", 1)
    assert published["files"] == ["config.json", "data.safetensors"]
    assert published["log_entry"].splitlines()[1:] == [published["lineage"], "1", published["digest"]]
    verified = cli.json(f"verify set {anchor}")
    assert verified == {name: value for name, value in published.items() if name not in {"path", "log_entry"}} | {
        "path": "set",
        "ok": True,
    }
    shown = cli.json("anchor reader.anchor")
    assert (shown["version"], shown["digest"], shown["lineage"]) == (1, published["digest"], published["lineage"])
    report = cli.json(f"verify set/data.safetensors {anchor} {key}")
    assert (report["ok"], report["not_protected"]) == (True, [])
    cli(f"unseal set/data.safetensors out.npz --allow-plain {anchor} {key}")
    assert np.load(folder / "out.npz")["y"].tolist() == [0, 1, 2, 3]
    assert cli.json(f"publish set --sign owner.signer --digests {anchor}")["version"] == 2
    assert "version 2 of 2 files" in cli(f"verify set {anchor}").stdout
    assert "version 2 or later" in cli("anchor reader.anchor").stdout


def test_what_is_older_is_refused(cli, key, anchor, folder):
    old = (folder / "set" / "fastrack.manifest").read_bytes()
    cli(f"publish set --sign owner.signer {anchor}")
    (folder / "set" / "fastrack.manifest").write_bytes(old)
    for line in (
        f"verify set {anchor}",
        f"verify set/data.safetensors {anchor} {key}",
        f"unseal set/data.safetensors out.npz {anchor} {key}",
        f"publish set --sign owner.signer {anchor}",
    ):
        assert "version 2 or later, got version 1" in cli.error(line)
        assert cli.json(line, status=1)["error"]["type"] == "RollbackError"
    assert not (folder / "out.npz").exists()


def test_a_missing_file_of_a_folder_that_is_walked_is_named(cli, key, anchor, folder):
    (folder / "set" / "data.safetensors").unlink()
    for line in (f"verify -r set {anchor} {key}", f"unseal -r set out {anchor} {key}"):
        assert "set/data.safetensors" in cli(line, status=1).stderr


def test_an_altered_file_is_named(cli, key, anchor, folder):
    (folder / "set" / "config.json").write_text("[]")
    assert "set/config.json" in cli.error(f"verify set {anchor}")
    (folder / "set" / "config.json").write_text("{}")
    data = (folder / "set" / "data.safetensors").read_bytes()
    place = data.index(np.arange(4).tobytes())
    (folder / "set" / "data.safetensors").write_bytes(data[:place] + b"\1" + data[place + 1 :])
    for line in (f"verify set {anchor}", f"verify set/data.safetensors {anchor} {key}"):
        assert cli.json(line, status=1)["error"]["tensor"] == "y"


@each(
    ("line", "told"),
    [
        ("publish set", "expected the owner's signing key"),
        ("publish set plain.npz --sign owner.signer", "the manifest of 2 paths"),
        ("publish plain.npz --sign owner.signer --out set/a.manifest", "in the folder of"),
        ("verify set", "or an anchor to compare this folder with its manifest"),
        ("verify set --anchor reader.anchor --key owner.key", "expected none with a folder"),
        ("anchor other.anchor --lineage 00", "expected the owner's public file"),
        ("anchor other.anchor --lineage 00 --owner owner.signer.pub", "32 hexadecimal digits"),
    ],
)
@pytest.mark.usefixtures("anchor")
def test_bad_usage_is_told(cli, line, told):
    assert told in " ".join(cli.error(line, status=2).replace("│", " ").split())


@each(
    ("line", "told"),
    [
        ("anchor no.anchor", "no such anchor"),
        ("anchor owner.signer.pub", "is not an anchor"),
        ("anchor reader.anchor --owner owner.signer.pub", "left as it was"),
        ("verify set --anchor no.anchor", "no such anchor"),
        ("publish nothing --sign owner.signer", "nothing"),
    ],
)
@pytest.mark.usefixtures("anchor")
def test_what_fails_is_told(cli, line, told):
    assert told in cli.error(line)
