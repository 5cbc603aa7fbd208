"""`broker machines`, `quarantine` and `lift`, on the log of a broker that granted keys."""

import getpass
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from broker.test_quarantine import PPID, Owner
from helpers.foundry.machine import Machine

from fastrack.attest._broker.ledger import read_log

DATABASE = "--database broker.db"
UNKNOWN = "ab" * 16


@pytest.fixture
def owner(cli, monkeypatch):  # noqa: ARG001 - its folder
    """Return a broker, whose made-up evidence is of another time than these commands think it is."""
    monkeypatch.setattr("fastrack._cli.commands.broker.read_clock", lambda: found.now)
    with closing((found := Owner("broker.db")).ledger):
        found.ask()
        found.ask(Machine("snp", 1, is_small=True))
        yield found


def test_machines_are_listed_and_refused_by_each_of_their_names(cli, owner):
    shown = cli.json(f"broker machines {DATABASE}")
    first, second = shown["machines"]
    assert (first["cpu"], first["until"], first["keys"]) == (PPID, "2026-06-01T12:10:00Z", [owner.key.id])
    assert (first["gpus"], first["quarantined"], shown["quarantined"]) == (second["gpus"], [], [])
    assert sorted(first["gpus"][0]) == ["chip_id", "ueid"]
    done = cli.json(f"broker quarantine {first['gpus'][0]['chip_id']} {DATABASE} --why 'case 12' --tell 'call 123'")
    name = first["gpus"][0]["chip_id"].lower()
    told = {"by": getpass.getuser(), "why": "case 12", "kind": "machine", "held": 2, "tell": "call 123"}
    assert done == {"event": "quarantined", "name": name, **told}
    assert read_log("broker.db")[-1].details == {"name": name, **told}
    shown = cli.json(f"broker machines {DATABASE}")
    assert [one["quarantined"] for one in shown["machines"]] == [[name], [name]]
    assert [one["why"] for one in shown["quarantined"]] == ["case 12"]
    text = cli(f"broker machines {DATABASE}").output
    assert PPID in text
    assert f"quarantined: {name} since" in text
    assert "in it since entry" in cli.error(f"broker quarantine {name} {DATABASE} --why again")
    assert cli(f"broker lift {name} {DATABASE} --why found --by bob").output == f"lifted: {name}\n"
    last = read_log("broker.db")[-1]
    assert (last.event, last.details) == ("lifted", {"by": "bob", "name": name, "why": "found"})
    assert "got another" in cli.error(f"broker lift {name} {DATABASE} --why found")
    owner.now = datetime(2026, 6, 2, tzinfo=UTC)
    assert cli.json(f"broker machines {DATABASE}")["machines"] == []


@pytest.mark.usefixtures("owner")
def test_what_would_refuse_nothing_is_not_taken(cli):
    before = read_log("broker.db")
    assert "need --unseen" in cli.error(f"broker quarantine {UNKNOWN} {DATABASE} --why x", status=2)
    for name in ("x", "policy.toml", "0102", f"{UNKNOWN}-"):
        cli.error(f"broker quarantine {name} {DATABASE} --why x --unseen", status=2)
    hostile = ("--why ''", "--why ' '", f"--why {'x' * 401}", "--why 'a\nb'", "--why x --tell ''", "--why x --by ''")
    for options in hostile:
        assert "--" in cli.error(f"broker quarantine {PPID} {DATABASE} {options}", status=2)
    for command in (f"quarantine {PPID}", f"lift {PPID}", "machines"):
        why = "" if command == "machines" else " --why x"
        assert "No such file" in cli.error(f"broker {command} --database none.db{why}")
        assert "none.db" not in cli.names()
    assert read_log("broker.db") == before
    assert cli.json(f"broker quarantine {UNKNOWN} {DATABASE} --why x --unseen")["kind"] == "unseen"


def test_an_altered_log_is_not_listed(cli, owner):
    owner.ledger.close()
    data = bytearray(Path("broker.db").read_bytes())
    data[data.rindex(PPID.encode())] ^= 1
    Path("altered.db").write_bytes(data)
    for command in ("machines", f"quarantine {PPID} --why x"):
        assert "verifying the audit log failed" in cli.error(f"broker {command} --database altered.db")
