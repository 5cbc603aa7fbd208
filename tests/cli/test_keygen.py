import stat

import pytest

from fastrack import Key


def test_a_key_file_is_made_that_only_its_owner_may_read(cli, folder):
    said = cli("keygen owner.key").stdout
    assert stat.S_IMODE((folder / "owner.key").stat().st_mode) == 0o600
    assert f"id: {Key.load('owner.key').id}\n" in said
    assert "--key owner.key" in said


@pytest.mark.parametrize("bits", [128, 256])
def test_a_key_has_the_bits_that_were_asked_for(cli, bits):
    document = cli.json(f"keygen owner.key --bits {bits}")
    assert Key.load("owner.key").bits == bits
    assert document == {"path": "owner.key", "key_id": Key.load("owner.key").id, "bits": bits}


def test_a_key_of_another_size_is_bad_usage(cli):
    assert "192" in cli.error("keygen owner.key --bits 192", status=2)
    assert cli.names() == []


@pytest.mark.usefixtures("key")
def test_a_key_file_is_never_replaced_and_needs_a_directory_that_is_there(cli, folder):
    before = (folder / "owner.key").read_bytes()
    assert "owner.key: exists and was left as it was" in cli.error("keygen owner.key")
    assert (folder / "owner.key").read_bytes() == before
    assert cli.error("keygen nowhere/owner.key") == "error: nowhere: no such directory; make it first\n"


def test_a_path_is_quoted_where_it_is_to_be_typed_again(cli):
    assert "--key 'my key'" in cli("keygen 'my key'").stdout


def test_the_ids_of_keys_of_every_kind_are_shown(cli, key, folder):
    cli("keygen small.key --bits 128")
    cli("keygen me --identity")
    cli("keygen owner --signer")
    cli(f"grant owner.key --to me.pub --sign owner {key.replace('--key owner.key', '')}")
    (folder / "keys").mkdir()
    (folder / "small.key").rename(folder / "keys" / "small.key")
    names = ["owner.key", "keys", "me", "me.pub", "owner", "owner.pub", "owner.key.grants"]
    (folder / "keys" / "notes.txt").write_text("no key")
    found = cli.json(f"key {' '.join(names)}")["keys"]
    names[1] = "keys/small.key"
    ids = {entry["source"]: entry["id"] for entry in found}
    assert list(ids) == names
    assert [entry["bits"] for entry in found] == [256, 128, None, None, None, None, 256]
    assert ids["me"] == ids["me.pub"]
    assert ids["owner"] == ids["owner.pub"]
    assert ids["owner.key"] == ids["owner.key.grants"] == Key.load("owner.key").id
    said = cli(f"key {' '.join(names)}").stdout
    assert all(found in said for found in ids.values())
    assert "verified" in said


def test_what_is_no_key_is_refused(cli, folder):
    (folder / "text").write_text("text")
    assert "text" in cli.error("key text")
    assert "missing" in cli.error("key missing")
    assert "--key" in cli.error(f"key {'0' * 64}", status=2)


def test_the_other_keys_are_shown_where_one_is_no_key(cli, folder):
    cli("keygen owner.key")
    (folder / "notes.txt").write_text("no key")
    (folder / "empty").mkdir()
    cli("keygen second.key")
    done = cli("key notes.txt owner.key missing empty second.key", status=1)
    assert all(Key.load(name).id in done.stdout for name in ("owner.key", "second.key"))
    told = done.stderr.splitlines()
    assert [line.split()[:2] for line in told] == [["error:", name] for name in ("notes.txt", "missing:", "empty:")]
    assert "chmod" not in done.stderr
    document = cli.json("key notes.txt owner.key missing", status=1)
    assert [entry["source"] for entry in document["keys"]] == ["owner.key"]
    assert [entry["source"] for entry in document["failed"]] == ["notes.txt", "missing"]
    assert document["error"] == document["failed"][0]["error"]
    assert document["error"]["type"] == "FormatError"


def test_a_key_in_a_folder_that_others_may_read_is_told_beside_the_rest(cli, folder):
    (folder / "keys").mkdir()
    for name in ("a.key", "b.key"):
        cli(f"keygen keys/{name}")
    (folder / "keys" / "a.key").chmod(0o644)
    done = cli("key keys", status=1)
    assert Key.load("keys/b.key").id in done.stdout
    assert "chmod 600 keys/a.key" in done.stderr


def test_many_files_that_are_no_keys_are_one_line(cli, folder):
    cli("keygen owner.key")
    for number in range(30):
        (folder / f"table{number:02}.csv").write_text("a,b")
    (folder / "damaged.key").write_text("fastrack-key-1:")
    line = f"key {' '.join(cli.names())} missing"
    done = cli(line, status=1)
    assert Key.load("owner.key").id in done.stdout
    told = done.stderr.splitlines()
    assert [said.split()[1].rstrip(":") for said in told[:2]] == ["damaged.key", "missing"]
    others = "30 other files are no keys: table00.csv, table01.csv, table02.csv, ...; --json tells of each"
    assert told[2:] == [f"error: {others}"]
    assert len(cli.json(line, status=1)["failed"]) == 32


def test_an_error_names_a_path_that_is_a_word_of_its_text(cli, folder):
    for name in ("keys", "folder", "a"):
        (folder / name).mkdir()
        assert cli("key " + name, status=1).stderr.startswith(f"error: {name}: expected keys in this folder")
    (folder / "file").write_text("no key")
    assert cli("key file", status=1).stderr.startswith("error: file is not a fastrack key file")
