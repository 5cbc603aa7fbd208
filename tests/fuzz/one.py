"""Fuzzes one target until its time is over, in a process of its own: ``python -m fuzz.one NAME FOLDER SECONDS``.

With a fourth argument, the path of an input, runs only that one: how a crash is looked at again.
"""

import hashlib
import re
import resource
import sys
from functools import partial
from pathlib import Path
from random import Random

import atheris

ADDRESSES = 1 << 30  # bytes of address space that an input may ask for, beyond those that the process has by then
COMPILED = ["fastrack._crypto.gather"]  # by numba

with atheris.instrument_imports(include=["fastrack"], exclude=COMPILED):
    import fastrack
    import fastrack.attest

    for package in (fastrack, fastrack.attest):  # or names would be imported when they are first used, uninstrumented
        for each in package.__all__:
            getattr(package, each)
    from fuzz import targets
    from fuzz.mutators import LONGEST, mutate_bytes


def main():
    name, folder, seconds, *inputs = sys.argv[1:]
    target = targets.make(name)
    corpus, crashes = Path(folder, "corpus", name), Path(folder, "crashes")
    corpus.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
        targets.guarded(target, seed)  # compiles what will be needed, before the address space is limited
    _limit_addresses()
    options = [f"-artifact_prefix={crashes}/{name}-", f"-max_len={LONGEST}", f"-max_total_time={seconds}"]
    options += ["-timeout=30", "-rss_limit_mb=3000", "-print_final_stats=1", "-verbosity=1"]
    places, once = inputs or [str(corpus)], partial(_run, target, crashes)
    atheris.Setup([sys.argv[0], *options, *places], once, custom_mutator=_mutator(target))
    atheris.Fuzz()


def _run(target, crashes, data):
    """Run an input, and keep it if it fails: an alarm may end a busy process before libFuzzer has done so."""
    try:
        targets.guarded(target, data)
    except BaseException:
        path = crashes / f"{target.name}-crash-{hashlib.sha1(data).hexdigest()}"  # as libFuzzer names it
        path.write_bytes(data)
        sys.stderr.write(f"Test unit written to {path}\n")
        raise


def _mutator(target):
    def mutate(data, size, seed):
        random = Random(seed)
        if random.random() < 0.2:
            return atheris.Mutate(data, size)
        for _ in range(random.choice([1, 1, 1, 2, 4])):
            data = target.mutate(data, random) or mutate_bytes(data, random)
        return data[:size]

    return mutate


def _limit_addresses():
    found = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    size = int(found[1]) * 1024 + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    main()
