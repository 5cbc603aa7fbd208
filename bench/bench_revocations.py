"""Train on a machine that is taken away: kills by a seeded schedule, and the time from SIGTERM to a checkpoint.

``python -m bench.bench_revocations [--kills 400] [--rounds 11] [--folder DIR] [--json FILE]``; some eight minutes.

Kills: processes train from the last sealed checkpoint, each until SIGKILL ends it, at exponential times. What is lost
is measured beside `fastrack_bench.revocations`, with the saves, restarts and steps of the same run, at the best
interval and at half and twice of it. The weights at the end are those of a run without interruption, bit for bit.

SIGTERM: a loop with `fastrack.PreemptionNotice` gets the signal and saves 256 MiB: sealed, and plain by ``torch.save``
and by safetensors, with fsync and rename, in turns; plain a second time beside it says what the noise is.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import struct
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import safetensors.torch
import torch

import fastrack
from bench.machine import read_machine
from fastrack_bench.revocations import Revocations

KEY = fastrack.Key.generate()
STEP = 0.002  # seconds of a step, at least
MEAN = 0.4  # seconds between two kills


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints are written: a disk")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        result = {"machine": read_machine(), "load": os.getloadavg()}
        if options.kills:
            result["kills"] = compare_intervals(folder, options.kills, options.seed)
        if options.rounds:
            result["notice"] = compare_saves(folder, options.rounds, options.mib << 20, options.seed)
    finally:
        shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


# Kills


class Shared:
    """Numbers that a child leaves to its parent, also when it is killed."""

    NAMES = ("ready", "last", "step", "saves", "saving", "working", "squares", "done")

    def __init__(self):
        self._memory = mmap(-1, 8 * len(self.NAMES))

    def __getitem__(self, name):
        return struct.unpack_from("d", self._memory, 8 * self.NAMES.index(name))[0]

    def __setitem__(self, name, value):
        struct.pack_into("d", self._memory, 8 * self.NAMES.index(name), value)


def start():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 16))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def take_step(model, optimizer, number):
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def digest(model, optimizer):
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def live(path, shared, every):
    """Go on from the last checkpoint, save after each `every` steps, until a kill, or until `done` is asked for."""
    take_step(*start(), 0)  # the first one of a process is slower: it belongs to the restart
    model, optimizer = start()
    step = 0
    if path.exists():
        state = fastrack.load_checkpoint(path, KEY)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    began = time.monotonic()
    shared["last"] = shared["ready"] = began
    while True:
        for _ in range(every):
            end = time.monotonic() + STEP
            take_step(model, optimizer, step)
            step += 1
            while time.monotonic() < end:
                pass
        saving = time.monotonic()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        fastrack.save_checkpoint(path, state, KEY)
        saved = time.monotonic()
        shared["working"] += saving - shared["last"]
        shared["saving"] += saved - saving
        shared["squares"] += (saved - shared["last"]) ** 2
        shared["saves"] += 1
        shared["step"], shared["last"] = step, saved
        if shared["done"]:
            return digest(model, optimizer)


def warm_up(path):
    """Import here what each child would import for itself."""
    model, optimizer = start()
    take_step(model, optimizer, 0)
    fastrack.save_checkpoint(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, KEY)
    optimizer.load_state_dict(fastrack.load_checkpoint(path, KEY)["optimizer"])


def run_alone(steps):
    """Return the digest of so many steps without an interruption."""
    model, optimizer = start()
    for step in range(steps):
        take_step(model, optimizer, step)
    return digest(model, optimizer)


def fork(action, *arguments):
    """Return the process id of a child that does something, and the end of a pipe with the text that it returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            text = action(*arguments)
            os.write(writing, (text or "").encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return child, os.fdopen(reading)


@dataclass
class Lives:
    """Figures of a run with kills, in seconds."""

    kills: int
    lost: list  # by each kill outside of a restart
    restarts: list  # from each kill to the first step after it, or to the next kill
    shared: Shared
    wall: float
    same: bool

    def report(self, mean):
        """Return the figures of the run beside those of the model."""
        shared = self.shared
        save, interval = shared["saving"] / shared["saves"], shared["working"] / shared["saves"]
        whole = [seconds for seconds, is_whole in self.restarts if is_whole]
        costs = Revocations(mean, save, statistics.mean(whole)).at(interval)
        lost = statistics.mean(self.lost)
        shares = {
            "saving": shared["saving"],
            "lost": sum(self.lost),
            "restarting": sum(each for each, _ in self.restarts),
        }
        return {
            "kills": self.kills,
            "same_weights": self.same,
            "steps": int(shared["step"]),
            "mean": mean,
            "save": save,
            "restart": statistics.mean(whole),
            "interval": interval,
            "lost_each": lost,
            "model_lost_each": costs.lost_each,
            "lost_ratio": lost / costs.lost_each,
            # Longer segments have more kills in them: 1 where all are equal, as in the model.
            "uneven": shared["squares"] * shared["saves"] / (shared["saving"] + shared["working"]) ** 2,
            "lost_error": statistics.stdev(self.lost) / len(self.lost) ** 0.5 / costs.lost_each,
            **{f"share_{name}": value / self.wall for name, value in shares.items()},
            **{f"model_share_{name}": getattr(costs, name) for name in shares},
            "slowdown": self.wall / shared["working"],
            "model_slowdown": costs.slowdown,
        }


def run_with_kills(folder, every, kills, mean, seed):
    """Kill so many processes at exponential times, and let the last one save and end."""
    path, shared, draw = folder / f"run-{every}.safetensors", Shared(), random.Random(seed)
    lost, restarts = [], []
    began = killed = time.monotonic()
    for _ in range(kills):
        at = killed + draw.expovariate(1 / mean)
        shared["ready"] = 0
        child, pipe = fork(live, path, shared, every)
        time.sleep(max(at - time.monotonic(), 0))
        now = time.monotonic()
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "a process ended by itself"
        pipe.close()
        if 0 < shared["ready"] <= now:
            restarts.append((shared["ready"] - killed, True))
            lost.append(max(now - shared["last"], 0.0))
        else:
            restarts.append((now - killed, False))
        killed = now
    wall = killed - began
    shared["done"] = 1
    child, pipe = fork(live, path, shared, every)
    with pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    child, pipe = fork(run_alone, int(shared["step"]))
    with pipe:
        same = pipe.read() == found != ""
    os.waitpid(child, 0)
    return Lives(kills, lost, restarts, shared, wall, same)


def compare_intervals(folder, kills, seed):
    """Kill at the best interval of the model, and at half and twice of it, after a short run that measures a save."""
    warm_up(folder / "warm.safetensors")
    first = run_with_kills(folder, 40, 20, MEAN, seed).report(MEAN)
    best = Revocations(MEAN, first["save"], first["restart"]).best()
    print(f"a save {first['save'] * 1e3:.1f} ms, a restart {first['restart'] * 1e3:.1f} ms, a kill each {MEAN} s: "
          f"best interval {best * 1e3:.0f} ms")  # fmt: skip
    reports = {}
    for name, factor, count in (("best", 1, kills), ("half", 0.5, kills // 3), ("double", 2, kills // 3)):
        every = max(round(best * factor / STEP), 1)
        report = reports[name] = run_with_kills(folder, every, max(count, 2), MEAN, seed + every).report(MEAN)
        tell(name, report)
    return reports


def tell(name, report):
    """Print the figures of a run."""
    weights = "equal" if report["same_weights"] else "DIFFERENT"
    print(f"{name}: {report['kills']} kills, interval {report['interval'] * 1e3:.0f} ms, weights {weights}")
    print(f"  lost each: {report['lost_each'] * 1e3:.1f} ms, by the model {report['model_lost_each'] * 1e3:.1f}: "
          f"{report['lost_ratio']:.3f} +- {report['lost_error']:.3f}; uneven: {report['uneven']:.3f}")  # fmt: skip
    for share in ("share_saving", "share_lost", "share_restarting", "slowdown"):
        print(f"  {share.replace('_', ' ')}: {report[share]:.3f}, by the model {report[f'model_{share}']:.3f}")


# From SIGTERM to a checkpoint


def save_sealed(state, path):
    fastrack.save_checkpoint(path, state, KEY)


def save_plain(state, path):
    """Save by torch as durably as sealed checkpoints are: whole or absent, and on disk."""
    with replacing(path) as file:
        torch.save(state, file)


@contextmanager
def replacing(path):
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path)


def sync_folder(path):
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def save_safetensors(state, path):
    """Save by safetensors, the fastest of plain ways, as durably."""
    temporary = path.with_suffix(".new")
    safetensors.torch.save_file(state, temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path)


SAVES = {"sealed": save_sealed, "plain": save_plain, "plain again": save_plain, "safetensors": save_safetensors}


def train_until_notice(state, path, shared, save):
    with fastrack.PreemptionNotice(deadline=120) as notice:
        shared["ready"] = 1
        while not notice.is_due():
            for tensor in state.values():
                tensor[:64].mul_(1.0)
            time.sleep(0.001)
        with notice.saving():
            save(state, path)
    shared["last"] = time.monotonic()


def seconds_to_save(state, path, save):
    """Return the seconds from SIGTERM to a process until its checkpoint is on disk."""
    shared = Shared()
    os.sync()
    child, pipe = fork(train_until_notice, state, path, shared, save)
    while not shared["ready"]:
        time.sleep(0.001)
    time.sleep(0.05)
    began = time.monotonic()
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == 0, "the process failed"
    pipe.close()
    path.unlink()
    return shared["last"] - began


def compare_saves(folder, rounds, size, seed):
    """Save in turns, and return the seconds and the ratios of pairs."""
    draw, seconds = random.Random(seed), {name: [] for name in SAVES}
    state = {f"weight{number}": torch.rand(1 << 20) for number in range(size >> 22)}
    for turn in range(rounds + 1):
        for name in draw.sample(list(SAVES), len(SAVES)):
            taken = seconds_to_save(state, folder / "state.safetensors", SAVES[name])
            if turn:  # the first one warms up
                seconds[name].append(taken)
    plain = seconds["plain"]
    ratios = {name: [one / two for one, two in zip(each, plain, strict=True)] for name, each in seconds.items()}
    print(f"SIGTERM to a checkpoint of {size >> 20} MiB on disk, {rounds} rounds:")
    for name, each in seconds.items():
        print(f"  {name}: {statistics.median(each):.3f} s ({min(each):.3f} to {max(each):.3f}), "
              f"{statistics.median(ratios[name]):.2f} of plain")  # fmt: skip
    pairs = zip(seconds["sealed"], seconds["safetensors"], strict=True)
    over = statistics.median(sealed / fast for sealed, fast in pairs)
    print(f"  sealed: {over:.2f} of safetensors")
    return {"bytes": size, "seconds": seconds, "ratio": statistics.median(ratios["sealed"]),
            "ratio_of_plain_again": statistics.median(ratios["plain again"]), "ratio_of_safetensors": over}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
