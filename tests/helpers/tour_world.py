"""A whole tour in one process, on a virtual clock: its network, orchestrator and holders do what a schedule says.

Desks, documents, keys and files are real. `World.visit` makes a visit whose messages have fates, one each: "carry",
"lose", "double" and so on. Whatever was sent before, in this tour or another, may come again. All that the network, the
disks and the logs get is kept for `World.leaks`.
"""

import base64
import itertools
import json
import logging
import os
import random
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch

import fastrack
from fastrack import attest, tour
from fastrack._util import atomic
from fastrack.attest import _kinds
from fastrack.errors import FastrackError
from fastrack.grants import Grants, Signer
from fastrack.tour import _messages, _owner, _request
from helpers import toy_kind
from helpers.foundry.authority import NOW
from helpers.leaks import Search
from helpers.signed import payload_of

NAMES = ("ada", "ben", "cleo")
MODEL, CHAIN, MANIFEST = "model.safetensors", "tour.chain", "model.safetensors.manifest"
POLICY = "version = 1\n[cpu.toy]\nmodels = ['bear']\n"
ROWS, WIDTH = 2, 8
REFUSALS = (FastrackError, OSError)  # what a visit may raise; all else is a fault


class Killed(BaseException):
    """The process of a visitor ends, at any point."""


def train(state, shards):
    """Mix a holder's rows into the weights, exactly. Another order or other data give other weights."""
    weights = state["model"]["weights"]
    _tick()
    for shard in shards:
        _tick()
        weights = weights * 5 + shard["rows"].sum(0) + int(shard["canary"].sum())
    _tick()
    if _visitors:
        _visitors[-1].world.moment += _visitors[-1].pause
        _visitors[-1].world.secrets[f"weights {weights[:2].tolist()}"] = weights.numpy().tobytes()[:32]
    return {"model": {"weights": weights}}


_visitors = []  # those that run, the innermost one last


def _tick():
    """Count a step of the visitor that runs, which may be its last one."""
    if _visitors:
        _visitors[-1].tick()


@dataclass
class Visitor:
    """A process that makes a visit. `fates` are those of its messages; at step `last` it is killed, or interrupted.

    Its training takes as long as `pause`.
    """

    world: object
    fates: object
    last: int | None = None
    is_power_cut: bool = False
    pause: timedelta = timedelta(0)
    is_dead: bool = False

    def tick(self):
        if self.is_dead:
            raise Killed
        if self.last is not None:
            self.last -= 1
            if self.last < 0:
                self.last = None
                self.is_dead = self.is_power_cut  # an interrupt lets it clean up
                raise Killed

    def clock(self):
        self.tick()
        return self.world.clock()

    def collect(self, binding):
        self.tick()
        self.world.recipients.add(binding.recipient.id)
        return attest.MachineEvidence(toy_kind.ToyEvidence(toy_kind.report(binding.report_data([])), b"bear"))


@dataclass
class Link:
    """A desk, as a visitor reaches it."""

    visitor: Visitor
    name: str

    def ask(self, step, body=b""):
        return self.visitor.world.carry(self.visitor, self.name, step, body)


@dataclass(frozen=True)
class Sent:
    """A message, and its answer; None if none came of it."""

    to: str
    step: str
    body: bytes
    answer: bytes | None


class Holder:
    """A holder of data with its keys, which live as long as the process of the tests."""

    def __init__(self, name, folder):
        self.name, self.signer, self.key = name, Signer.generate(), fastrack.Key.generate()
        self.rows = torch.randint(-(1 << 60), 1 << 60, (ROWS, WIDTH))
        self.canary = torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.uint8)
        self.data = folder / f"{name}.safetensors"
        fastrack.save_file({"rows": self.rows, "canary": self.canary}, self.data, self.key)
        with fastrack.load_file(self.data) as file:
            self.file_id = file.file_id

    @property
    def secrets(self):
        name = self.name
        return {
            f"canary of {name}": self.canary.numpy().tobytes(),
            f"rows of {name}": self.rows.numpy().tobytes()[:32],
            f"key of {name}": bytes(self.key.material()),
        }


class Parties:
    """The owner with a first model, and three holders."""

    def __init__(self, folder):
        self.owner, self.key = Signer.generate(), fastrack.Key.generate()
        self.holders = {name: Holder(name, folder) for name in NAMES}
        self.weights = torch.randint(-(1 << 60), 1 << 60, (WIDTH,))
        self.model = folder / MODEL
        fastrack.save_checkpoint(self.model, {"model": {"weights": self.weights}}, key=self.key)
        fastrack.publish(self.model, signer=self.owner)
        self.code = tour.code_digest(train)

    @property
    def secrets(self):
        of_owner = {"first key": bytes(self.key.material()), "first weights": self.weights.numpy().tobytes()[:32]}
        return of_owner | {name: value for holder in self.holders.values() for name, value in holder.secrets.items()}


@cache
def parties():
    """Return the parties, which are made once a process, and the messages of another tour of theirs."""
    folder = _new_folder()
    made = Parties(folder)
    with world(random.Random(1), order=("ben", "ada"), made=made) as other:
        other.complete()
        shutil.copytree(other.folders[-2], folder / "foreign")
        return made, tuple(other.sent), folder / "foreign"


def _new_folder():
    memory = Path("/dev/shm")  # a disk would only make it slow: `tests/tour/test_kills.py` has one
    return Path(tempfile.mkdtemp(prefix="tour-", dir=memory if memory.is_dir() else None))


@contextmanager
def world(chance, order, *, attempts=40, made=None):
    """Make a world, with the kind of evidence that is fastest, and remove it."""
    kinds, sync = dict(_kinds.CPU_KINDS), atomic.sync_directory
    _kinds.CPU_KINDS["toy"] = toy_kind.TOY
    atomic.sync_directory = lambda folder: (_tick(), sync(folder))
    # `parties` is looked up before, since it makes a world too.
    made, foreign, elsewhere = (made, (), None) if made else parties()
    folder = _new_folder()
    here = World(folder, chance, order, attempts, made, foreign, elsewhere)
    logger = logging.getLogger("fastrack")
    logger.addHandler(here.handler)
    try:
        yield here
    finally:
        logger.removeHandler(here.handler)
        here.close()
        shutil.rmtree(folder)
        _kinds.CPU_KINDS.clear()
        _kinds.CPU_KINDS.update(kinds)
        atomic.sync_directory = sync


class World:
    """One tour. `chance` is a `random.Random` that chooses what the fates leave open."""

    def __init__(self, folder, chance, order, attempts, made, foreign, elsewhere):
        self.folder, self.chance, self.made, self.foreign, self.elsewhere = folder, chance, made, foreign, elsewhere
        self.moment, self.numbers, self.depth = NOW, itertools.count(1), 0
        self.search, self.secrets, self.recipients = Search(), dict(made.secrets), set()
        self.sent, self.delayed, self.answered, self.consents = [], [], set(), []
        self.watch = lambda *_: None  # called with each message that a desk answered or refused
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.search.add(record.getMessage().encode())
        names = {name: made.holders[name].signer.verifier for name in made.holders if name in order}
        self.folders = [folder / "0"]
        self.plan = tour.start(
            made.model,
            self.folders[0],
            train,
            signer=made.owner,
            holders=names,
            order=order,
            lifetime=timedelta(days=7),
            visit_limit=timedelta(minutes=10),
            attempts=attempts,
            clock=self.clock,
        )
        roots = attest.TrustedRoots(others={"toys": toy_kind.TOY.roots})
        self.terms = tour.Terms.from_toml(POLICY, roots=roots, clock=self.clock)
        self.ledgers, self.desks = {}, {}
        for name in ("owner", *names):
            self.restart(name)

    def clock(self):
        self.moment += timedelta(milliseconds=1)
        return self.moment

    def close(self):
        for ledger in self.ledgers.values():
            ledger.close()

    def restart(self, name):
        """Open a desk, as after a crash: what it has is what its database has."""
        if name in self.ledgers:
            self.ledgers[name].close()
            self.watch(Sent(name, "restart", b"", b""))
        self.ledgers[name] = ledger = tour.TourLedger(self.folder / f"{name}.db")
        made, common = self.made, {"terms": self.terms, "ledger": ledger}
        if name == "owner":
            self.desks[name] = tour.OwnerDesk(self.plan, made.key, signer=made.owner, **common)
        else:
            holder = made.holders[name]
            self.desks[name] = tour.HolderDesk(
                self.plan, [holder.key], files=[holder.file_id], signer=holder.signer, **common
            )

    # Visits.

    def visit(self, folder=None, *, holder=None, data=None, fates=(), **visitor):
        """Make a visit, and return its folder; None if it failed. It begins with the newest folder by default."""
        folder = folder or self.newest()
        holder = holder or self.turn(folder)
        out = self.folder / str(next(self.numbers))
        visitor = Visitor(self, iter(fates), **visitor)
        _visitors.append(visitor)
        self.depth += 1
        try:
            tour.visit(
                folder,
                out,
                train,
                owner=self.made.owner.verifier,
                owner_desk=Link(visitor, "owner"),
                holder_desk=Link(visitor, holder),
                data=[self.made.holders[data or holder].data],
                collect=visitor.collect,
                clock=visitor.clock,
            )
        except (*REFUSALS, Killed) as error:
            self.search.add(str(error).encode())
            self.refusal = error
        finally:
            self.depth -= 1
            _visitors.pop()
        if not out.exists():
            return None
        self.folders.append(out)
        return out

    def receipts(self, folder):
        """Return the number of receipts that a folder has, without verification."""
        return (folder / CHAIN).read_bytes().count(b"\n") - 1

    def newest(self):
        return max(self.folders, key=lambda folder: (self.receipts(folder), int(folder.name)))

    def turn(self, folder):
        return self.plan.order[min(self.receipts(folder), len(self.plan.order) - 1)]

    def finish(self, folder):
        """Ask the owner for the end of the tour. Return its answer's parts."""
        body = _messages.pack("finish", chain=(folder / CHAIN).read_bytes(), manifest=(folder / MANIFEST).read_bytes())
        return _messages.unpack("finished", self.deliver("owner", "finish", body))

    # The network.

    def deliver(self, to, step, body):
        """Hand a message to a desk. What it says has to be right."""
        self.search.add(body)
        try:
            answer = self.desks[to].ask(step, body)
        except FastrackError as error:
            self.search.add(str(error).encode())
            self.note(Sent(to, step, body, None))
            raise
        self.note(Sent(to, step, body, answer))
        self.search.add(answer)
        if step == "begin":
            self.check_grants(to, body, answer)
        return answer

    def note(self, sent):
        self.sent.append(sent)
        self.watch(sent)

    def attempt(self, to, step, body):
        """Hand a message to a desk, and return its answer; None if it was refused."""
        with suppress(FastrackError):
            return self.deliver(to, step, body)

    def check_grants(self, to, body, answer):
        """Require of keys that were granted: for a new request, to the machine that made it, at its turn and time."""
        assert (to, body) not in self.answered, f"{to} answered the same request twice"
        self.answered.add((to, body))
        parts = _messages.unpack("begin", body)
        recipient = attest.Offer.from_bytes(parts["offer"]).recipient.id
        assert recipient in self.recipients, f"{to} granted keys to a machine that did not ask"
        kind, issuer = ("delegated", self.made.owner) if to == "owner" else ("consented", self.made.holders[to].signer)
        found = _messages.unpack(kind, answer)
        source = found if to == "owner" else parts
        delegation = tour.Delegation.from_bytes(source["delegation"], signer=self.made.owner.verifier)
        request = _request.VisitRequest.from_bytes(parts["request"])
        assert (delegation.signer, delegation.visit) == (request.signer, request.visit), f"{to} confused two visitors"
        assert delegation.expires <= self.moment + timedelta(seconds=self.plan.seconds), (
            "the owner delegated for too long"
        )
        grants = [Grants.from_bytes(each, owner=issuer.verifier) for each in _messages.read_grants(found["grants"])]
        for grant in grants:
            assert [each.id for each in grant.recipients] == [recipient], f"{to} granted keys to another machine"
            assert self.moment < grant.expires <= delegation.expires, f"{to} granted keys for too long"
        if to == "owner":
            assert len(grants) == 2
            self.remember_keys()
        else:
            assert self.plan.order[delegation.visit] == to, f"{to} granted its keys at the turn of another"
            own = [consent[1:] for consent in self.consents if consent[0] == to]
            assert (delegation.visit, delegation.attempt) > max(own, default=(-1, 0)), f"{to} granted to an older visit"
            self.consents.append((to, delegation.visit, delegation.attempt))

    def remember_keys(self):
        """Learn the fresh keys, to search for them."""
        latest = self.ledgers["owner"].latest()
        name = f"key of visit {latest.visit}, attempt {latest.attempt}"
        delegation = tour.Delegation.from_bytes(latest.document, signer=self.plan.owner)
        self.secrets[name] = bytes(_owner._derive(self.made.key, bytes.fromhex(delegation.salt), self.plan).material())

    def carry(self, visitor, to, step, body):
        """Carry a message of a visitor as its fate says. `tick` is before and after: it may be killed there."""
        visitor.tick()
        answer = FATES[next(visitor.fates, "carry")](self, visitor, to, step, body)
        visitor.tick()
        return answer

    def others(self, to, step):
        """Return messages that were sent before: to the same desk for the same step first."""
        same = [each for each in self.sent if (each.to, each.step) == (to, step)]
        return same, [*self.sent, *self.foreign]

    # Each of these is a fate of a message.

    def _carry(self, visitor, to, step, body):
        return self.deliver(to, step, body)

    def _lose(self, visitor, to, step, body):
        self.search.add(body)
        raise ConnectionError("the message was lost")

    def _lose_answer(self, visitor, to, step, body):
        self.deliver(to, step, body)
        raise ConnectionError("the answer was lost")

    def _double(self, visitor, to, step, body):
        answer = self.deliver(to, step, body)
        self.attempt(to, step, body)
        return answer

    def _double_late(self, visitor, to, step, body):
        self.deliver(to, step, body)
        return self.deliver(to, step, body)

    def _delay(self, visitor, to, step, body):
        self.delayed.append((to, step, body))
        raise TimeoutError("the message was late")

    def _reorder(self, visitor, to, step, body):
        self.deliver_delayed()
        return self.deliver(to, step, body)

    def _replay(self, visitor, to, step, body):
        self.replay()
        return self.deliver(to, step, body)

    def _astray(self, visitor, to, step, body):
        return self.deliver(self.chance.choice(sorted(self.desks)), step, body)

    def _everywhere(self, visitor, to, step, body):
        """A holder, or the network, tries a request at all other desks first."""
        for name in self.desks:
            if name != to:
                self.attempt(name, step, body)
        return self.deliver(to, step, body)

    def _flip(self, visitor, to, step, body):
        return self.deliver(to, step, self.flipped(body))

    def _flip_answer(self, visitor, to, step, body):
        return self.flipped(self.deliver(to, step, body))

    def _swap(self, visitor, to, step, body):
        return self.deliver(to, step, self.swapped("begin" if step == "begin" else step, body))

    def _swap_answer(self, visitor, to, step, body):
        return self.swapped("delegated" if to == "owner" else "consented", self.deliver(to, step, body))

    def _stale(self, visitor, to, step, body):
        same, _ = self.others(to, step)
        answers = [each.answer for each in same if each.answer is not None]
        answer = self.deliver(to, step, body)
        return self.chance.choice(answers) if answers else answer

    def _instead(self, visitor, to, step, body):
        """An older answer comes, and the message does not."""
        answers = [each.answer for each in self.others(to, step)[0] if each.answer is not None]
        if not answers:
            raise ConnectionError("the message was lost")
        return self.chance.choice(answers)

    def _restart(self, visitor, to, step, body):
        self.restart(to)
        return self.deliver(to, step, body)

    def _crash(self, visitor, to, step, body):
        self.deliver(to, step, body)
        self.restart(to)
        raise ConnectionError("the desk crashed behind its work")

    def _halt(self, visitor, to, step, body):
        """The desk crashes in the middle of a transaction."""

        def halt(*_):
            raise Killed

        self.ledgers[to]._append = halt
        try:
            return self.deliver(to, step, body)
        except Killed:
            raise ConnectionError("the desk crashed in its work") from None
        finally:
            self.restart(to)

    def _overtake(self, visitor, to, step, body):
        """Another visitor begins the same visit, and ends it, before the message arrives."""
        if self.depth < 2:
            self.visit()
        return self.deliver(to, step, body)

    def _overtake_after(self, visitor, to, step, body):
        answer = self.deliver(to, step, body)
        if self.depth < 2:
            self.visit()
        return answer

    def _late(self, visitor, to, step, body):
        self.moment += timedelta(seconds=self.chance.choice([1, 299, 301, 601]))
        return self.deliver(to, step, body)

    def _kill(self, visitor, to, step, body):
        self.deliver(to, step, body)
        visitor.is_dead = True
        raise Killed

    def _interrupt(self, visitor, to, step, body):
        self.deliver(to, step, body)
        raise Killed

    # A holder that lies.

    def _other_keys(self, visitor, to, step, body):
        """A holder grants another key than its files have, or none."""
        answer = self.deliver(to, step, body)
        if to == "owner" or step != "begin":
            return answer
        recipient = attest.Offer.from_bytes(_messages.unpack("begin", body)["offer"]).recipient
        keys = [fastrack.Key.generate() for _ in range(self.chance.randrange(3))]
        signer = self.made.holders[to].signer
        grants = _messages.write_grants(Grants.issue(key, [recipient], signer=signer).envelope for key in keys)
        return _messages.pack("consented", consent=_messages.unpack("consented", answer)["consent"], grants=grants)

    def _other_consent(self, visitor, to, step, body):
        """A holder signs what it did not check: for no files, or at the turn of another."""
        if to == "owner" or step != "begin":
            return self.deliver(to, step, body)
        parts, holder = _messages.unpack("begin", body), self.made.holders[to]
        delegation = tour.Delegation.from_bytes(parts["delegation"], signer=self.made.owner.verifier)
        files = () if self.plan.order[delegation.visit] == to else (holder.file_id,)
        consent = tour.Consent(
            delegation=delegation.digest,
            offer="0" * 64,
            policy=self.terms.policy_digest,
            files=files,
            issued=self.moment,
            expires=delegation.expires,
        ).sign(holder.signer)
        recipient = attest.Offer.from_bytes(parts["offer"]).recipient
        grants = _messages.write_grants([Grants.issue(holder.key, [recipient], signer=holder.signer).envelope])
        return _messages.pack("consented", consent=consent.envelope, grants=grants)

    # What is done with messages.

    def flipped(self, body):
        if not body:
            return b"\1"
        changed = bytearray(body)
        changed[self.chance.randrange(len(body))] ^= 1 << self.chance.randrange(8)
        return bytes(changed)

    def swapped(self, kind, body):
        """Return a message of which one part is that of another message."""
        try:
            parts = dict(_messages.unpack(kind, body))
            sources = [each.body if kind == "begin" else each.answer for each in (*self.sent, *self.foreign)]
            other = _messages.unpack(
                kind, self.chance.choice([each for each in sources if each and f"tour-{kind}".encode() in each])
            )
        except (KeyError, IndexError, FastrackError):
            return body
        name = self.chance.choice(sorted(parts))
        return _messages.pack(kind, **(parts | {name: other[name]}))

    def replay(self):
        """Send an old message again, to its desk or to another one."""
        if self.sent or self.foreign:
            old = self.chance.choice([*self.sent, *self.foreign])
            self.attempt(old.to if self.chance.random() < 0.7 and old.to in self.desks else "owner", old.step, old.body)

    def deliver_delayed(self):
        self.chance.shuffle(self.delayed)
        while self.delayed:
            self.attempt(*self.delayed.pop())

    # The orchestrator.

    def doctored(self):
        """Return a folder that an orchestrator made of those that it has."""
        first, second = self.chance.choice(self.folders), self.chance.choice([*self.folders, self.elsewhere])
        made = self.folder / f"doctored-{next(self.numbers)}"
        shutil.copytree(first, made)
        name = self.chance.choice([MODEL, CHAIN, MANIFEST, "lines", "byte"])
        if name == "lines":
            lines = (made / CHAIN).read_bytes().splitlines(keepends=True)
            foreign = (second / CHAIN).read_bytes().splitlines(keepends=True)
            place = self.chance.randrange(len(lines) + 1)
            changed = [
                lines[:place],
                [*lines[:place], *lines[place + 1 :]],
                [*lines[:place], foreign[-1], *lines[place:]],
                [*lines, *foreign[1:]],
                [*lines, lines[-1]],
                [line.replace(b"\n", b"\r\n") for line in lines],
                [*lines, b"\r"],
                lines[::-1],
            ]
            (made / CHAIN).write_bytes(b"".join(self.chance.choice(changed)))
        elif name == "byte":
            path = made / self.chance.choice([MODEL, CHAIN, MANIFEST])
            path.write_bytes(self.flipped(path.read_bytes()))
        else:
            shutil.copyfile(second / name, made / name)
        return made

    # The end.

    def complete(self):
        """Make all visits that are left, without faults or lies any more, and finish the tour.

        Of the folders the newest one that the owner accepts is the model to go on with.
        """
        while self.receipts(self.newest()) < len(self.plan.order) or not self._is_finished():
            begun = next((folder for folder in self._candidates() if self.visit(folder)), None)
            if begun is None:
                raise AssertionError(f"the tour does not go on: {self.refusal}") from self.refusal
            self.check_forks(begun)

    def check_forks(self, folder):
        """Require that no other model of the same number is accepted after one was."""
        for other in self.folders:
            if self.receipts(other) == self.receipts(folder) and self.chain_of(other) != self.chain_of(folder):
                assert self.visit(other) is None, "the owner accepted two models of one visit"

    def chain_of(self, folder):
        return (folder / CHAIN).read_bytes()

    def _candidates(self):
        count = len(self.plan.order)
        folders = [folder for folder in self.folders if self.receipts(folder) < count]
        return sorted(folders, key=lambda folder: (-self.receipts(folder), -int(folder.name)))[:8]

    def _is_finished(self):
        """Finish with one of the last folders; the owner accepts one if it was not overtaken."""
        for folder in self.folders[::-1]:
            if self.receipts(folder) == len(self.plan.order):
                with suppress(FastrackError):
                    parts = self.finish(folder)
                    self.last, self.manifest = folder, parts["manifest"]
                    chain = tour.Chain.load(folder / CHAIN, owner=self.made.owner.verifier)
                    self.chain = chain.extend(parts["completion"])
                    return True
        return False

    def check(self):
        """Require what has to hold at the end of a tour, whatever was done to it."""
        chain = tour.Chain.from_bytes(self.chain.to_bytes(), owner=self.made.owner.verifier)
        chain.require_complete()
        assert [visit.holder for visit in chain.visits] == list(self.plan.order)
        numbers = [chain.plan.start.number, *(visit.after.number for visit in chain.visits)]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        keys = [self.made.key.id, *(visit.delegation.key for visit in chain.visits)]
        assert len(set(keys)) == len(keys), "a key was used for two versions"
        manifest = fastrack.load_manifest(self.last / MANIFEST, owner=chain.visits[-1].delegation.signer)
        assert {entry.key for entry in manifest.files.values()} == {keys[-1]}
        state = fastrack.load_checkpoint(self.last / MODEL, keys=tour.model_key(chain, self.made.key))
        assert torch.equal(state["model"]["weights"], self.expected()), "another model than training in turn gives"
        assert all(visit.receipt.ended <= visit.delegation.expires for visit in chain.visits), "a visit took too long"
        self.check_owner(chain)
        self.check_holders(chain)
        other = (self.elsewhere / MANIFEST).read_bytes()
        answer = self.attempt("owner", "finish", _messages.pack("finish", chain=chain.to_bytes(), manifest=other))
        assert answer is None, "the owner signed another manifest"

    def expected(self):
        """Return the weights that training in one place gives."""
        weights = self.made.weights
        for name in self.plan.order:
            holder = self.made.holders[name]
            weights = weights * 5 + holder.rows.sum(0) + int(holder.canary.sum())
        return weights

    def check_owner(self, chain=None):
        """Require one receipt of each visit that is over, of its last attempt."""
        for visit in range(len(self.plan.order)):
            attempts = list(self.ledgers["owner"].attempts(visit))
            accepted = [each for each in attempts if each.receipt is not None]
            assert accepted in ([], attempts[-1:]), f"visit {visit}: the receipt of a void attempt was accepted"
            for each in accepted:
                delegation = json.loads(payload_of(each.receipt))["delegation"]
                assert base64.b64decode(delegation) == each.document, f"visit {visit}: the receipt is of a void attempt"
            if chain is not None:
                assert [each.receipt for each in accepted] == [chain.visits[visit].receipt.envelope]

    def check_holders(self, chain):
        """Require a receipt of each consent, but of visits that were overtaken or rolled back.

        A holder gets the receipt with its next visit at the latest; whoever ends the tour brings those of the last one.
        """
        for name in self.plan.holders:
            *before, _ = [visit.receipt.digest for visit in chain.visits if visit.holder == name]
            kept = {receipt.digest for _, receipt in self.desks[name].receipts() if receipt is not None}
            assert kept.issuperset(before), f"{name} lacks the receipt of an earlier visit"
            for visit in chain.visits:
                if visit.holder == name:
                    self.desks[name].ask("end", visit.receipt.envelope)
            own = {visit.consent.digest: visit for visit in chain.visits if visit.holder == name}
            last = {visit.delegation.digest for visit in own.values()}
            for consent, receipt in self.desks[name].receipts():
                if consent.delegation in last:
                    assert receipt is not None
                    assert receipt.digest == own.pop(consent.digest).receipt.digest
            assert not own, f"{name} has no consent for {len(own)} of its visits"

    def leaks(self):
        """Return the names of the secrets that the network, a disk, a folder or a log has."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                self.search.add(path.read_bytes())
        return self.search.find(self.secrets)


FATES = {
    name[1:].replace("_", " "): value
    for name, value in vars(World).items()
    if name.startswith("_") and callable(value) and value.__code__.co_varnames[1:5] == ("visitor", "to", "step", "body")
}
