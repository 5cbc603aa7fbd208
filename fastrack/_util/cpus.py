"""CPUs that this process may use: those of its affinity, at most the quota of its control groups."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_NO_QUOTA = {"max", "-1"}


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of threads that can run at a time, at least 1: a started CPU of the quota is one."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    # More threads than the quota use it up sooner, and all of them then stand still until the period is over.
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


@cache
def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPUs that control groups give to this process, as a fraction; None if they set no quota.

    A group gets no more than any group above it, of those that are mounted here. See cgroups(7), `cpu.max` of cgroup2
    and `cpu.cfs_quota_us` of cgroup1.
    """
    quotas = []
    with suppress(ValueError, ArithmeticError):  # of a kernel that writes these files in another way
        for folder, mount in _groups(root):
            above = [group for group in folder.parents if group.is_relative_to(mount)]
            quotas += [_quota_of(group) for group in (folder, *above)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(root: Path) -> list[tuple[Path, Path]]:
    """Return the folder of each control group of this process that may have a CPU quota, and where it is mounted."""
    paths = {}  # by kind
    for line in read_system(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = group
    found = []
    for line in read_system(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        top, point = map(_unescape, before.split(" ")[3:5])
        mount, path = root / point.lstrip("/"), PurePosixPath(paths[kind])
        # In a container the mount may begin at its own group, or show nothing of the path.
        inside = path.relative_to(top) if path.is_relative_to(top) and ".." not in path.parts else PurePosixPath()
        found.append((mount / inside, mount))
    return found


def _quota_of(group: Path) -> float | None:
    pair = read_system(group / "cpu.max").split()
    if not pair:
        pair = [*read_system(group / "cpu.cfs_quota_us").split(), *read_system(group / "cpu.cfs_period_us").split()]
    if len(pair) != 2 or pair[0] in _NO_QUOTA:
        return None
    quota, period = map(int, pair)
    return quota / period


def _unescape(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def read_system(path: Path) -> str:
    """Return the text of a file of the kernel, empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
