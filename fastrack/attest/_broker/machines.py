"""Machines in a broker's log: their names, which of them hold keys until when, and what is in quarantine."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from fastrack._documents.canonical import encode_time
from fastrack._service.journal import LogRecord

MARKS = ("quarantined", "lifted")
ID = re.compile("[0-9a-f]{8,}")  # and not the word for a chip whose host hides its id

_MEMBERS = {"cpu": ("ppid", "chip_ids"), "devices": ("chip_id", "ueid")}


@dataclass(frozen=True, slots=True)
class Holder:
    """A machine that was given keys, by the entry with its claims. `until` is None for ever, `names` are all its own.

    Of a GPU the chip id stays, and the UEID changes with firmware.
    """

    cpu: str | None
    gpus: list[dict[str, Any]]
    keys: list[str]
    policy: str | None
    address: str | None
    entry: int
    renewed: str
    until: str | None
    names: list[str]
    quarantined: list[str]


def names_of(details: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in an entry: of a machine and its GPUs, of keys, and of the policy; each with what it names."""
    parts = [("cpu", details.get("cpu") or {}), *(("devices", device) for device in details.get("devices") or ())]
    found = [(part.get(member), "machine") for place, part in parts for member in _MEMBERS[place]]
    found += [(key, "key") for key in details.get("keys") or ()]
    found.append((details.get("policy"), "policy"))
    return {name.lower(): kind for name, kind in found if isinstance(name, str) and ID.fullmatch(name.lower())}


def find_quarantined(entries: Iterable[LogRecord]) -> dict[str, LogRecord]:
    """Return the entries that put something into quarantine which was not lifted since, by its name."""
    last = {str(entry.details.get("name")): entry for entry in entries if entry.event in MARKS}
    return {name: entry for name, entry in last.items() if entry.event == MARKS[0]}


def find_holders(entries: list[LogRecord], now: datetime) -> list[Holder]:
    """Return the machines that may use keys at a time, in the order in which they were given the first of them."""
    granted: dict[int, LogRecord] = {}
    found: dict[object, Holder] = {}
    marked = find_quarantined(entries)
    for entry in entries:
        if entry.event not in {"granted", "renewed"}:
            continue
        first = granted.setdefault(entry.details.get("as", entry.number), entry)
        details, names = first.details, list(names_of(first.details))
        gpus = [{name: device.get(name) for name in _MEMBERS["devices"]} for device in details.get("devices") or ()]
        cpu = next(filter(None, map((details.get("cpu") or {}).get, _MEMBERS["cpu"])), None)
        group = str((cpu, [gpu["chip_id"] for gpu in gpus], details.get("keys")))
        until = None
        if (lease := details.get("lease")) is not None:
            until = encode_time(datetime.fromisoformat(entry.time) + timedelta(seconds=lease))
        if group in found:  # keys that were given for ever are never taken back
            until = until and found[group].until and max(until, found[group].until or "")
        told = details.get("keys", []), details.get("policy"), entry.details.get("address")
        stopped = [name for name in names if name in marked]
        found[group] = Holder(cpu, gpus, *told, first.number, entry.time, until, names, stopped)
    return [holder for holder in found.values() if holder.until is None or holder.until > encode_time(now)]
