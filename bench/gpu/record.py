"""Keep the document of a stage on disk, whole from its start and after every row, whatever ends the process."""

import gc
import json
import re
import time
import traceback
from datetime import UTC, datetime

from bench.gpu.gpu import Skip, WrongResultError
from bench.machine import ROOT

VERSION = 2
RUNNING, DONE, SKIPPED, FAILED = "running", "done", "skipped", "FAILED"
_LOG = 6000  # characters kept of a process's output
_PATH = re.compile(r"(?<![\w.+/:-])/(?:[\w.+@-]+/)+")


def create(folder, stage, machine, *, device, quick, seconds, budget=None):
    """Write a document that holds no results yet, and return its path."""
    now = datetime.now(UTC)
    slug = re.sub(r"[^a-z0-9]+", "-", machine["gpu"]["name"].lower()).strip("-")
    path = folder / f"{now:%Y-%m-%d}-gpu-{stage}-{slug}-{machine['cpu']['threads']}cores.json"
    document = {
        "version": VERSION,
        "suite": "gpu",
        "stage": stage,
        "date": now.isoformat(timespec="seconds"),
        "outcome": RUNNING,
        "why": "",
        "seconds": 0.0,
        "limit": seconds,
        "quick": quick,
        "budget": budget,
        "device": device,
        "machine": machine,
        "steps": [],
        "targets": [],
        "timeline": None,
        "rows": [],
        "log": "",
    }
    folder.mkdir(parents=True, exist_ok=True)
    write(path, document)
    return path


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write(path, document):
    """Replace a document in one step, so that a reader finds the old one or the new one."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def settle(path, code, output, seconds):
    """Complete the document of a process that ended, and return it. One that did not finish has failed."""
    document = read(path)
    if document["outcome"] == RUNNING:
        why = f"not done after {seconds:g} s" if code is None else f"its process ended with {code}"
        document["seconds"] = seconds if code is None else document["seconds"]
        for step in document["steps"]:
            if step["outcome"] == RUNNING:
                step |= {"outcome": FAILED, "why": why}
        document |= {"outcome": FAILED, "why": why}
    if any(step["outcome"] == FAILED for step in document["steps"]) or document["outcome"] == FAILED:
        document["log"] = clean(output)[-_LOG:]
    write(path, document)
    path.with_suffix(".part").unlink(missing_ok=True)
    return document


def clean(text):
    return _PATH.sub("", text.replace(f"{ROOT}/", ""))


class Record:
    """Collect the results of a stage."""

    def __init__(self, path):
        self.gpu = None  # once opened, it must answer after every failed step
        self.rows = []
        self._path, self.document = path, read(path)
        self._start = time.perf_counter()
        self._lost = None

    @property
    def left(self):
        return self.document["limit"] - (time.perf_counter() - self._start)

    def step(self, name, action, *, is_check=False, here=True):
        """Do a part even if earlier ones failed, keep its result, and return whether it was done.

        `here` says that it needs the device in this process. A failed check is worse than a figure that is missing.
        """
        print(name)
        step = {"name": name, "outcome": RUNNING, "why": "", "seconds": 0.0, "is_check": is_check, "found": None}
        self.document["steps"].append(step)
        self.save()
        start = time.perf_counter()
        try:
            self._require_possible(here=here)
            result = json.dumps(action())
            step |= {"found": json.loads(clean(result)), "outcome": DONE}
        except Skip as skip:
            step |= {"outcome": SKIPPED, "why": str(skip)}
        except Exception as error:  # noqa: BLE001 - the others go on
            why = clean(f"{type(error).__name__}: {error}")
            step |= {"outcome": FAILED, "why": why, "is_check": is_check or _is_wrong(error)}
            print(traceback.format_exc())
        step["seconds"] = time.perf_counter() - start
        if step["outcome"] == FAILED and here and self.gpu and not self._lost and not self.gpu.is_well():
            self._lost = name
        self.save()
        gc.collect()
        if self.gpu and not self._lost:
            self.gpu.tidy()
        return step["outcome"] == DONE

    def measure(self, name, rows):
        """Do a step that yields rows. Each is on disk before the next one is measured."""

        def action():
            for row in rows():
                self.add(row)
                if self.left <= 0:
                    raise TimeoutError("no time was left for the rest; the rows so far are kept")

        return self.step(name, action)

    def add(self, row):
        self.rows.append(row)
        self.document["rows"].append(row.as_dict())
        self.save()

    def put(self, key, value):
        """Keep a part of the document that is no row."""
        self.document[key] = value
        self.save()

    def save(self):
        self.document["seconds"] = time.perf_counter() - self._start
        write(self._path, self.document)

    def finish(self):
        steps = self.document["steps"]
        failed = [step["name"] for step in steps if step["outcome"] == FAILED and step["is_check"]]
        if failed:
            self.document |= {"outcome": FAILED, "why": f"failed: {', '.join(failed)}"}
        else:
            is_skipped = all(step["outcome"] == SKIPPED for step in steps)
            self.document["outcome"] = SKIPPED if is_skipped else DONE
        self.save()

    def _require_possible(self, *, here):
        if here and self._lost:
            raise Skip(f"the device does not answer since the step {self._lost!r}")
        if self.left <= 0:
            raise Skip(f"no time was left of {self.document['limit']:g} s")


def _is_wrong(error):
    from fastrack.errors import FastrackError

    return isinstance(error, (WrongResultError, FastrackError))
