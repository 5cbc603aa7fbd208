"""A tour by its commands, from the plan to the record that is verified later."""

import json
import re
import shutil
import sqlite3
from contextlib import closing

import pytest
import torch
from cli.conftest import Script
from helpers import local_machine
from helpers.foundry.authority import NOW
from helpers.tour_files import TRAIN, Tour, be_reached, clock, lines_of, open_desk
from helpers.tour_rig import Rig

import fastrack
from fastrack import tour
from fastrack._documents import canonical, fields
from fastrack._service.journal import _hash_entry

ORDER = "aba"
CHAIN = "out/final/tour.chain"
VERIFY = f"tour verify {CHAIN} --owner owner.signer.pub"


def patch_machine(patch, made):
    """Have commands use a made-up machine, its vendors and its time."""
    local_machine.replace(patch, made.machine, clock)


@pytest.fixture
def served(monkeypatch):
    """A list of the desks that commands have served, which end at once."""
    pytest.importorskip("uvicorn")
    found = []
    monkeypatch.setattr("fastrack.tour.serve", lambda desk, **options: found.append((desk, options)))
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with all that a tour needs, before its first visit."""
    folder = tmp_path_factory.mktemp("prepared")
    made = Tour(folder, ORDER)
    (folder / "run.toml").write_text("\n".join(lines_of(made)))
    return made


@pytest.fixture
def made(folder, prepared, monkeypatch):
    shutil.copytree(prepared.folder, folder, dirs_exist_ok=True)
    patch_machine(monkeypatch, prepared)
    return prepared


@pytest.fixture(scope="module")
def toured(prepared, tmp_path_factory):
    """A copy of that folder with the whole tour."""
    folder = tmp_path_factory.mktemp("toured")
    shutil.copytree(prepared.folder, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch_machine(patch, prepared)
        patch.chdir(folder)
        run_tour(patch, prepared, folder)
    return folder


def run_tour(patch, made, folder, status=0):
    """Run the command, with desks of this process at the addresses of the configuration."""
    desks = [open_desk(folder, name) for name in ("owner", *made.holders)]
    be_reached(patch, lambda _, url: desks[int(url[-1]) - 1])
    return Script(folder)("tour run v0 out --config run.toml", status=status)


@pytest.fixture
def after(folder, made, toured):
    """The folder of the test after the whole tour."""
    shutil.copytree(toured, folder, dirs_exist_ok=True)
    return made


def test_a_plan_is_signed_and_accepted_by_its_digest(cli, made, served):
    plan = f"tour plan model.safetensors new --train {TRAIN} --signer owner.signer --order a,b,a --lifetime 30d"
    holders = "--holder a=a.signer.pub --holder b=b.signer.pub"
    printed = cli(f"{plan} {holders} --visit-limit 10m --attempts 2").stdout
    digest = re.search(r"^plan: ([0-9a-f]{64})$", printed, re.MULTILINE)[1]
    chain = tour.Chain.load("new/tour.chain", owner=made.owner.verifier)
    assert chain.plan.digest == digest
    assert (chain.plan.order, chain.plan.seconds, chain.plan.attempts) == (("a", "b", "a"), 600, 2)
    assert abs((chain.plan.expires - NOW).days - 30) <= 1
    assert "exists" in cli.error(f"{plan} {holders}")
    assert "--order" in cli.error(f"{plan.replace('new', 'newer')} --holder a=a.signer.pub", status=2)
    assert "NAME=PUBLIC" in cli.error(f"{plan.replace('new', 'newer')} --holder a.signer.pub", status=2)
    desk = "--policy policy.toml --insecure-loopback"
    hold = f"tour hold new --owner owner.signer.pub --signer a.signer --key a.key --data a.safetensors {desk}"
    cli(f"{hold} --plan-digest {digest} --database a.db")
    cli(f"tour own new/tour.chain --signer owner.signer --key model.key {desk} --database owner.db --port 9")
    assert [(each.role, options["port"]) for each, options in served] == [("holder", 8443), ("owner", 9)]
    assert "another tour" in cli.error(f"{hold} --plan-digest {made.plan.digest} --database c.db")
    assert "64 hexadecimal" in cli.error(f"{hold} --plan-digest {digest[:8]} --database c.db", status=2)


def test_a_desk_of_too_much_data_is_not_told_of_its_signer_alone(cli, made, served, limited):
    limited(tour_grants=fields.list_of(fields.binary(1 << 20), 0))
    hold = "tour hold v0 --owner owner.signer.pub --signer a.signer --key a.key --data a.safetensors"
    desk = f"--policy policy.toml --insecure-loopback --plan-digest {made.plan.digest} --database new.db"
    told = cli.error(f"{hold} {desk}", status=2)
    assert "error: --signer or --data: opening the desk of a" in told
    assert "Seal fewer and larger files" in told
    assert served == []


def test_a_desk_is_refused_without_tls_with_plain_data_or_as_another_party(cli, made, served, folder):
    given = f"--owner owner.signer.pub --plan-digest {made.plan.digest} --policy policy.toml --database new.db"
    hold = f"tour hold v0 {given} --key a.key"
    own = "tour own v0 --signer owner.signer --key model.key --policy policy.toml --database new.db"
    for line in (f"{hold} --signer a.signer --data a.safetensors", own):
        assert "--private-key and --client-ca" in cli.error(f"{line} --certificate tls.pem", status=2)
    fastrack.save_file({"x": torch.ones(2), "y": torch.ones(2)}, "part.safetensors", "a.key", plain=["y"])
    hold += " --insecure-loopback"
    assert "1 plain tensors" in cli.error(f"{hold} --signer a.signer --data part.safetensors")
    (folder / "empty").mkdir()
    assert "folder without" in cli.error(f"{hold} --signer a.signer --data empty")
    assert "--key" in cli.error(f"{hold} --signer a.signer --data b.safetensors")
    assert "opening a holder's desk" in cli.error(f"{hold} --signer owner.signer --data a.safetensors", status=2)
    cli.error(f"{own} --insecure-loopback".replace("owner.signer", "a.signer"))
    assert served == []


def test_a_tour_is_run_verified_and_opened(cli, after):
    printed = cli(f"{VERIFY} --plan-digest {after.plan.digest} --model out/final --database a.db").stdout
    assert "3 visits, all as they were signed; complete" in printed
    rows = [line.split() for line in printed.splitlines() if re.match(r"[012] ", line)]
    assert [row[1] for row in rows] == list(ORDER)
    cli("tour key out/final final.key --owner owner.signer.pub --key model.key")
    state = fastrack.load_checkpoint("out/final/model.safetensors", keys="final.key")
    assert torch.equal(state["model"]["w"], after.expected())
    assert "exists" in cli.error("tour key out/final final.key --owner owner.signer.pub --key model.key")
    assert "the owner of this tour" in cli.error("tour key out/final new.key --owner owner.signer.pub --key a.key")
    document = cli.json(f"{VERIFY} --database b.db")
    assert (document["ok"], document["complete"], document["attempts"]) == (True, True, [])
    assert [(each["visit"], each["attempt"], each["chunks"]) for each in document["visits"]] == [
        (number, 1, 1) for number in range(3)
    ]


def test_a_run_goes_on_where_it_was_interrupted_and_takes_no_other_tour(cli, made, monkeypatch, folder):
    def fail(*_, **__):
        raise ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(tour, "finish", fail)
        assert "away" in run_tour(monkeypatch, made, folder, status=1).stderr
    shutil.rmtree(folder / "out/visit-2")  # lost with its machine
    assert run_tour(monkeypatch, made, folder).stderr == "visit 2 of a: out/visit-2\n"
    before = (folder / CHAIN).read_bytes()
    assert "3 visits, complete" in run_tour(monkeypatch, made, folder).stdout
    assert (folder / CHAIN).read_bytes() == before
    assert cli.json(VERIFY)["visits"][2]["attempt"] == 2
    [void] = cli.json(f"{VERIFY} --database a.db")["attempts"]
    assert (void["visit"], void["attempt"], void["state"]) == (2, 1, "void by a later attempt")
    shutil.rmtree(folder / "out/visit-1")
    shutil.copytree(folder / "out/visit-0", folder / "out/visit-1")
    assert "expected the visit after receipt 1" in cli.error("tour run v0 out --config run.toml")


def test_a_run_does_not_take_the_end_of_another_tour_for_its_own(after, monkeypatch, folder, tmp_path_factory):
    rig = Rig(tmp_path_factory.mktemp("other"), owner=after.owner)
    rig.whole()
    shutil.rmtree(folder / "out/final")
    tour.finish(rig.folder / "v3", folder / "out/final", owner=after.owner.verifier, owner_desk=rig.owner_desk)
    assert "expected the end of tour" in run_tour(monkeypatch, after, folder, status=1).stderr


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines[:4] + lines[5:], "the members data, desk as holders."),
        (lambda lines: ["other = 1", *lines], "as other, got an unknown one"),
        (lambda lines: ["train = 1", *lines[1:]], "a string as train, got 1"),
        (lambda lines: lines[1:], "a string as train, got none"),
        (lambda lines: ["= 1", *lines], "run.toml failed: expected TOML"),
        (lambda lines: [*lines[:-1], "data = [1]"], ".data[0], got"),
        (lambda lines: [line.replace("http:", "ftp:") for line in lines], "https://HOST:PORT"),
        (lambda lines: lines[:6], "holder b by the plan"),
    ],
)
def test_a_configuration_that_is_not_one_is_named(cli, after, folder, change, problem):
    shutil.rmtree(folder / "out/final")
    (folder / "run.toml").write_text("\n".join(change(lines_of(after))))
    result = cli("tour run v0 out --config run.toml", status=2 if "https" in problem else 1)
    assert problem in result.stderr


@pytest.mark.usefixtures("after")
def test_a_chain_that_was_shortened_reordered_or_altered_is_refused_with_the_place(cli, folder):
    lines = (folder / CHAIN).read_bytes().splitlines(keepends=True)
    assert len(lines) == 5

    def verify(content, options="", status=1):
        (folder / "changed.chain").write_bytes(b"".join(content))
        return cli(f"{VERIFY.replace(CHAIN, 'changed.chain')} {options}", status=status).stderr

    assert verify(lines, status=0) == ""
    assert "after 2 receipts" in verify([*lines[:3], *lines[4:]])
    assert "behind receipt 3" in verify(lines[:4])
    assert "behind receipt 2" in verify(lines[:3])
    assert verify(lines[:3], "--partial", status=0) == ""
    assert "line 2, after 0 receipts" in verify([lines[0], lines[2], lines[1], *lines[3:]])
    for number, line in enumerate(lines, 1):
        middle = len(line) // 2
        altered = line[:middle] + (b"A" if line[middle] != 65 else b"B") + line[middle + 1 :]
        assert f"line {number}" in verify([*lines[: number - 1], altered, *lines[number:]])
    assert "plan" in cli.error(f"{VERIFY} --plan-digest {'0' * 64}")
    assert "line 1" in cli.error(VERIFY.replace("owner.signer", "a.signer"))


@pytest.mark.usefixtures("after")
def test_another_model_than_the_chain_says_is_refused(cli, folder):
    for name in ("v0", "out/visit-0", "out/visit-1"):
        cli.error(f"{VERIFY} --model {name}")
    cli(f"{VERIFY} --model out/visit-2")
    content = bytearray((folder / "out/final/model.safetensors").read_bytes())
    content[100] ^= 1
    (folder / "out/final/model.safetensors").write_bytes(content)
    cli.error(f"{VERIFY} --model out/final")


@pytest.mark.usefixtures("after")
def test_the_record_of_a_holder_and_the_chain_have_to_agree(cli, folder):
    partial = "tour verify out/visit-1/tour.chain --owner owner.signer.pub --partial"
    assert "expected receipt" in cli.error(f"{partial} --database a.db")  # the receipt of visit 2 was left out
    assert cli.json(f"{partial} --database b.db")["attempts"] == []
    assert "database of a holder" in cli.error(f"{VERIFY} --database owner.db")
    cli.error(f"{VERIFY} --database none.db")
    assert not (folder / "none.db").exists()
    with closing(tour.TourLedger(folder / "a.db")) as ledger:
        ledger.append("begun", {"visit": 2, "attempt": 7}, now=NOW)
    assert "attempts, offers and receipts of its log" in cli.error(f"{VERIFY} --database a.db")


SWAPS = {
    "every offer": "offer = x'00'",
    "one offer": "offer = CASE visit WHEN 2 THEN x'00' ELSE offer END",
    "offers of two visits": "offer = (SELECT offer FROM old WHERE old.visit = 2 - attempts.visit)",
    "receipts of two visits": "receipt = (SELECT receipt FROM old WHERE old.visit = 2 - attempts.visit)",
    "consents and offers of two visits": "(document, offer) = "
    "(SELECT document, offer FROM old WHERE old.visit = 2 - attempts.visit)",
}


@pytest.mark.usefixtures("after")
def test_a_holders_database_with_other_documents_is_refused(cli, folder):
    cli(f"{VERIFY} --database a.db")
    for name in ("a.db", "earlier.db"):  # the log of an earlier version has no digests of offers, but consents have
        with closing(sqlite3.connect(folder / name)) as database:
            if name == "earlier.db":
                sqlite3.connect(folder / "a.db").backup(database)
                forget_offers(database)
                cli(f"{VERIFY} --database {name}")
            for number, change in enumerate(list(SWAPS.values())[:: 1 if name == "a.db" else 2]):
                with closing(sqlite3.connect(folder / f"{number}-{name}")) as copy:
                    database.backup(copy)
                    copy.executescript(
                        "DROP TRIGGER receipts_are_final; CREATE TEMP TABLE old AS SELECT * FROM attempts"
                    )
                    copy.executescript(f"UPDATE attempts SET {change}")
                assert "It was altered" in cli.error(f"{VERIFY} --database {number}-{name}"), change


ALTERED = {
    "an offer of text": "UPDATE attempts SET offer = 'x'",
    "a receipt of text": "UPDATE attempts SET receipt = 'x'",
    "no visit in the log": {"attempt": 1},
    "a visit of another type in the log": {"attempt": 1, "visit": []},
}


@pytest.mark.usefixtures("after")
def test_a_database_with_values_of_other_types_is_refused(cli, folder):
    for number, (name, change) in enumerate(ALTERED.items()):
        with closing(sqlite3.connect(folder / f"{number}.db")) as copy:
            sqlite3.connect(folder / "a.db").backup(copy)
            copy.executescript("DROP TRIGGER receipts_are_final")
            copy.executescript(change if isinstance(change, str) else "")
        if isinstance(change, dict):
            with closing(tour.TourLedger(folder / f"{number}.db")) as ledger:
                ledger.append("begun", change, now=NOW)
        assert "expected" in cli.error(f"{VERIFY} --database {number}.db"), name


def forget_offers(database):
    """Give a database the log that an earlier version wrote."""
    database.execute("DROP TRIGGER log_is_not_changed")
    before = bytes(32)
    for number, moment, event, details in database.execute("SELECT number, time, event, details FROM log").fetchall():
        text = canonical.encode(
            {name: value for name, value in json.loads(details).items() if name != "offer"}
        ).decode()
        before = _hash_entry(before, number, moment, event, text)
        database.execute("UPDATE log SET details = ?, hash = ? WHERE number = ?", (text, before, number))
    database.commit()


def test_a_visit_that_was_broken_off_or_never_ended_is_listed(cli, made, folder):
    class Silent:
        def __init__(self, desk):
            self.desk = desk

        def ask(self, step, body=b""):
            if step == "end":
                raise ConnectionError
            return self.desk.ask(step, body)

    owner, holder = open_desk(folder, "owner"), open_desk(folder, "a")
    for number, desk in enumerate([holder, Silent(holder)]):
        with pytest.raises(fastrack.GrantError):  # the data are another holder's
            tour.visit(
                "v0", f"w{number}", TRAIN, owner=made.owner.verifier, owner_desk=owner, holder_desk=desk,
                data=["b.safetensors"], collect=made.machine, clock=clock,
            )  # fmt: skip
    line = "tour verify v0 --owner owner.signer.pub --partial --database a.db"
    assert [each["state"] for each in cli.json(line)["attempts"]] == ["broken off", "without a receipt"]
    assert "visit 0, attempt 2" in cli(line).stdout
    assert "NOT COMPLETE" in cli(line).stdout
    assert cli.json(line.replace("--partial", ""), status=1)["error"]["type"] == "RollbackError"


def test_a_holder_ends_a_visit_in_progress_by_a_command(cli, made, folder, served):
    desk = f"--policy policy.toml --insecure-loopback --owner owner.signer.pub --plan-digest {made.plan.digest}"
    hold = f"tour hold v0 {desk} --signer a.signer --key a.key --data a.safetensors --database a.db"
    assert "--lease" in cli.error(f"{hold} --lease 1s", status=2)
    assert "--lease" in cli.error(f"{hold} --lease soon", status=2)
    assert "none.db" in cli.error("tour stop --database none.db --why asked")
    for why in ("''", "'a\tb'", "\udcff", 401 * "a"):
        line = f"tour stop --database none.db --why {why}"
        assert "expected a line of up to 400 characters" in cli.error(line, status=2)
    assert not (folder / "none.db").exists()
    cli(f"{hold} --lease 30m")
    [(holder, _)] = served
    assert "expected one in progress" in cli.error("tour stop --database a.db --why asked")

    class Stopped:
        def ask(self, step, body=b""):
            answer = holder.ask(step, body)
            if step == "begin":
                stopped.append(cli.json("tour stop --database a.db --why 'the wrong cohort'"))
            return answer

    stopped = []
    tour.visit(
        "v0", "v1", TRAIN, owner=made.owner.verifier, owner_desk=open_desk(folder, "owner"), holder_desk=Stopped(),
        data=["a.safetensors"], collect=made.machine, clock=clock,
    )  # fmt: skip
    assert stopped == [{"path": "a.db", "visit": 0, "attempt": 1, "seconds": 1800}]
    line = "tour verify v1 --owner owner.signer.pub --partial --database a.db"
    [attempt] = cli.json(line)["attempts"]  # it was over before the lease was
    assert attempt["state"] == "in the chain; ended by its holder: the wrong cohort"
    assert "expected one in progress" in cli.error("tour stop --database a.db --why asked")
    assert "keys are on a lease" in cli.error("tour stop --database owner.db --why asked")
