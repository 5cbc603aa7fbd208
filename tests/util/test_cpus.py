import os
import shutil
import sys

import pytest

from fastrack._util.cpus import cpu_quota, usable_cpus

V2 = "31 23 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n"
V1 = (
    "32 31 0:29 {} /sys/fs/cgroup/cpu\\040acct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
)


@pytest.fixture
def machine(tmp_path):
    """Make the file system of a machine: this process's groups, the mounts, and files below /sys/fs/cgroup."""

    def make(groups, mounts, **files):
        files = {f"sys/fs/cgroup/{path}": text for path, text in files.items()}
        for path, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return make


def v1(quota, period=100_000, group=""):
    return {
        f"cpu acct{group}/cpu.cfs_{name}_us": f"{value}\n" for name, value in (("quota", quota), ("period", period))
    }


@pytest.mark.parametrize(
    ("limit", "quota"),
    [
        ("50000 100000\n", 0.5),
        ("200000 100000\n", 2.0),
        ("max 100000\n", None),
        ("", None),
        (f"1{'0' * 400} 1\n", None),
    ],
)
def test_a_quota_of_cgroup2_is_read(machine, limit, quota):
    assert cpu_quota(machine("0::/job\n", V2, **{"job/cpu.max": limit})) == quota


def test_the_smallest_quota_along_the_path_counts(machine):
    limits = {"a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000", "a/b/c/cpu.max": "max 100000"}
    assert cpu_quota(machine("0::/a/b/c\n", V2, **limits, **{"other/cpu.max": "1000 100000"})) == 1.5


def test_a_container_sees_its_own_group_as_the_top(machine):
    assert cpu_quota(machine("0::/\n", V2, **{"cpu.max": "100000 100000"})) == 1.0
    assert cpu_quota.__wrapped__(machine("0::/../../elsewhere\n", V2)) == 1.0


@pytest.mark.parametrize("top", ["/", "/docker/7"])
def test_a_quota_of_cgroup1_is_read_from_where_its_controller_is_mounted(machine, top):
    group = "/docker/7" if top == "/" else ""
    groups = "3:cpuset:/docker/7\n2:cpu,cpuacct:/docker/7\n0::/docker/7\n"
    assert cpu_quota(machine(groups, V1.format(top), **(v1(-1) | v1(250_000, group=group)))) == 2.5
    assert cpu_quota.__wrapped__(machine(groups, V1.format(top), **v1(-1, group=group))) is None


@pytest.mark.parametrize(
    ("groups", "mounts", "limit"),
    [
        ("", "", "1 1"),
        ("0::/\n", V2, "a b"),
        ("0::/\n", V2, "1 0"),
        ("nonsense\n", V2, "1 1"),
        ("0::/\n", " - ", "1 1"),
    ],
)
def test_what_cannot_be_read_is_no_quota(machine, groups, mounts, limit):
    assert cpu_quota(machine(groups, mounts, **{"cpu.max": limit})) is None


@pytest.mark.parametrize(
    ("quota", "affinity", "threads"),
    [("0.01", 8, 1), ("0.5", 8, 1), ("1", 8, 1), ("1.01", 8, 2), ("4", 8, 4), ("16", 8, 8), ("max", 8, 8), ("4", 1, 1)],
)
def test_threads_follow_the_quota_rounded_up_and_the_affinity(machine, monkeypatch, quota, affinity, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    limit = quota if quota == "max" else str(round(100_000 * float(quota)))
    assert usable_cpus(machine("0::/\n", V2, **{"cpu.max": f"{limit} 100000"})) == threads


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no control groups")
def test_the_quota_is_read_once(machine, monkeypatch):
    root = machine("0::/\n", V2, **{"cpu.max": "100000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cpus(root) == 1
    shutil.rmtree(root)
    assert usable_cpus(root) == 1
