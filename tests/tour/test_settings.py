"""Settings of a site for its own visits, in a file that no job names."""

import pytest
from helpers.tour_rig import Rig, machine

from fastrack import FormatError, GrantError, KeyPermissionError, RollbackError, attest, tour
from fastrack.grants import Signer
from fastrack.tour._settings import VisitSettings

OWNER = Signer.generate().verifier
DESK = 'url = "https://desk.example:8443"'


@pytest.fixture
def load(tmp_path):
    """Return a function that reads settings with some lines in the place of others."""

    def load(others=(), more=""):
        lines = {
            "owner": f'owner = "{OWNER}"',
            "holder": 'holder = "ada"',
            "train": 'train = "json.tool:main"',
            "data": 'data = ["a.safetensors", "/b.safetensors", "https://store.example/c.safetensors"]',
            "owner_desk": f"[owner_desk]\n{DESK}\ntimeout = 7",
            "holder_desk": f"[holder_desk]\n{DESK}",
        }
        path = tmp_path / "visit.toml"
        path.write_text("\n".join([*{**lines, **dict(others)}.values(), more]))
        return VisitSettings.load(path)

    return load


def test_settings_are_the_arguments_of_a_visit(load, tmp_path):
    found = load().arguments()
    assert found["data"] == (f"{tmp_path}/a.safetensors", "/b.safetensors", "https://store.example/c.safetensors")
    assert (found["owner"], found["train"], found["device"]) == (OWNER, "json.tool:main", None)
    assert found["owner_desk"] == tour.RemoteDesk("https://desk.example:8443", timeout=7.0)
    assert found["collect"] is attest.collect_evidence


def test_a_desk_may_have_a_part_of_a_second(load):
    found = load({"owner_desk": f"[owner_desk]\n{DESK}\ntimeout = 0.5"})
    assert found.owner_desk == tour.RemoteDesk("https://desk.example:8443", timeout=0.5)


def test_other_evidence_is_a_function_that_the_site_names(load):
    found = load({"data": 'data = ["a"]\ncollect = "helpers.tour_rig:machine"\ndevice = "cuda:1"'})
    assert (found.collect, found.device) == (machine, "cuda:1")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"owner": ""}, "a string as owner, got none"),
        ({"holder": "holder = 1"}, "a string as holder"),
        ({"train": ""}, "a string as train"),
        ({"data": ""}, "a list of paths or URLs as data"),
        ({"data": "data = []"}, "as data"),
        ({"data": 'data = ["a"]\nsites = 3'}, "one of the keys .* as sites"),
        ({"data": 'data = ["a"]\ncollect = "json:none"'}, "module:function as collect"),
        ({"holder_desk": ""}, "a table as holder_desk"),
        ({"owner_desk": "[owner_desk]"}, "as owner_desk.url"),
        ({"owner_desk": f"[owner_desk]\n{DESK}\ntoken = 1"}, "as owner_desk.token"),
        *(
            ({"owner_desk": f"[owner_desk]\n{DESK}\ntimeout = {seconds}"}, "a number of seconds above 0")
            for seconds in ("0", "-1", "nan", "inf", "true", '"7"')
        ),
    ],
)
def test_settings_that_are_not_known_or_not_there_are_refused(load, others, message):
    with pytest.raises(FormatError, match=message):
        load(others)


def test_settings_that_others_may_write_are_refused(load, tmp_path):
    load()
    (tmp_path / "visit.toml").chmod(0o666)
    with pytest.raises(KeyPermissionError):
        VisitSettings.load(tmp_path / "visit.toml")


def test_a_site_refuses_turns_of_other_holders_and_plans_of_other_owners(load, tmp_path):
    rig = Rig(tmp_path)
    chain = tour.Chain.load(rig.folder / "v0" / "tour.chain", owner=rig.owner.verifier)
    own = {"owner": f'owner = "{rig.owner.verifier}"'}
    load(own).require_turn(chain)
    with pytest.raises(RollbackError, match="expected a turn of ben, got that of ada"):
        load({**own, "holder": 'holder = "ben"'}).require_turn(chain)
    with pytest.raises(GrantError, match="only models of that owner"):
        load().require_turn(chain)
