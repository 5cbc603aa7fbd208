"""Measure all peers, in turns, so that other work of the machine falls on all of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from bench.peers.catalog import PEERS
from bench.peers.children import Child, DeadError


@dataclass(slots=True)
class Result:
    """Results of a peer. With an error, results from before it."""

    slug: str
    name: str
    settings: str
    is_read: bool
    version: str = ""
    error: str = ""
    bytes: int = 0  # of the file
    seal_owned: int = 0
    open_owned: int = 0
    seal: list[float] = field(default_factory=list)
    synced: list[float] = field(default_factory=list)
    open: list[float] = field(default_factory=list)
    flip: str = ""
    cut: str = ""
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, slug):
        peer = PEERS[slug]
        return cls(slug, peer.name, peer.settings, peer.is_read)

    @property
    def is_whole(self):
        return not self.error and bool(self.open)

    def median(self, what):
        return median(getattr(self, what))


def measure(slugs, size, rounds, folder, *, seed=0, say=print, child=Child):
    children = {slug: child(slug, size, folder, seed) for slug in slugs}
    results = {slug: Result.of(slug) for slug in slugs}
    turns, shuffler = list(slugs), random.Random(seed)

    def each(action):
        for slug in turns:
            result = results[slug]
            if result.error:
                continue
            try:
                action(children[slug], result)
            except DeadError as error:
                result.error = str(error)
                say(f"  {result.name}: {error}")

    try:
        say("each twice, compared with what was sealed, and watched")
        each(_start)
        each(_try_once)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            shuffler.shuffle(turns)  # so that no peer always follows the same one
            each(_seal)
            each(partial(_open, is_last=number + 1 == rounds))
        say("each with a bit changed, and with a page cut off")
        each(_tamper)
    finally:
        for each_child in children.values():
            each_child.end()
    return list(results.values())


def _start(child, result):
    result.version = child.ask("start")["version"]


def _try_once(child, result):
    """Seal and open once to load and compile everything, then again to measure memory."""
    child.ask("seal")
    child.ask("open")
    _compare(child)
    child.ask("forget")
    child.ask("trim")
    reply = child.ask_watched("seal")
    result.bytes, result.seal_owned = reply["bytes"], reply["owned"]
    child.ask("trim")
    result.open_owned = child.ask_watched("open")["owned"]
    child.ask("forget")


def _seal(child, result):
    child.ask("warm")
    reply = child.ask("seal")
    result.seal.append(reply["seconds"])
    result.synced.append(reply["synced"])


def _open(child, result, *, is_last):
    """Open. Compare the arrays the last time, untimed."""
    child.ask("warm")
    result.open.append(child.ask("open")["seconds"])
    if is_last:
        _compare(child)
    child.ask("forget")


def _compare(child):
    if not child.ask("verify")["same"]:
        raise DeadError("what it opened is not what it sealed")


def _tamper(child, result):
    for what in ("flip", "cut"):
        reply = child.ask(what)
        setattr(result, what, reply["outcome"])
        if "by" in reply:
            result.notes[what] = reply["by"]
