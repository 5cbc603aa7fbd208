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
