"""Make first contact with a GPU: its properties, right results, and its bounds."""

import json
import os
import re
import subprocess
import sys

from bench.gpu.gpu import Skip, WrongResultError
from bench.gpu.plan import KIB, MIB
from bench.gpu.processes import run as run_process

_QUERY = "driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,clocks.sm,clocks.max.sm"
_QUERY += ",power.limit,mig.mode.current"
_TELLING = re.compile(r"UUID|Serial|Host|Name  |Process|PDI|Bus Id|GUID|VBIOS")


def run(stage):
    from bench.gpu import kernels, known, latency, link, micro

    record, short = stage.record, stage.plan.shortened(16 * KIB, MIB, shares=(1, 1 / 4), budget=4.0)
    record.step("environment", read_environment, here=False)
    record.step("driver's report", read_report, here=False)
    record.step("doctor", ask_doctor, here=False, is_check=True)  # whose self-test moves tensors, and forges one
    record.step("driver", lambda: stage.gpu.kernels(), is_check=True)  # noqa: PLW0108 - it opens the GPU
    record.step("known answers", lambda: known.check(stage.gpu), is_check=True)
    for name, part in (("link", link), ("latency", latency), ("kernels", kernels)):
        record.measure(name, lambda part=part: part.measure(stage.gpu, short))
    record.step("instruction rates", lambda: micro.measure(stage.gpu))


def read_environment():
    """Return the reports of `nvidia-smi` and the C library."""
    rows = [line.split(", ") for line in _ask(f"--query-gpu={_QUERY}", "--format=csv,noheader")]
    return {
        "nvidia-smi": dict(zip(_QUERY.split(","), zip(*rows, strict=True), strict=False)),
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
    }


def read_report():
    """Return the lines of `nvidia-smi -q` but for those that tell a GPU from others, and processes."""
    return [line.rstrip() for line in _ask("-q") if not _TELLING.search(line)]


def _ask(*options):
    try:
        return subprocess.run(
            ["nvidia-smi", *options], capture_output=True, text=True, check=False, timeout=30
        ).stdout.splitlines()
    except OSError as error:
        raise Skip(f"nvidia-smi cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Skip("nvidia-smi does not answer") from error


def ask_doctor():
    """Return the report of ``fastrack doctor`` on CUDA and the host's engine."""
    code, output = run_process([sys.executable, "-m", "fastrack", "doctor", "--json"], 90)
    if code is None:
        raise TimeoutError("fastrack doctor did not end")
    start = output.find("{")
    if start < 0:
        raise Skip(f"fastrack doctor cannot be run: {(output.strip().splitlines() or ['it said nothing'])[-1]}")
    found = json.loads(output[start:])
    cuda = found.get("cuda")
    if cuda is not None and not cuda["usable"]:
        raise WrongResultError(str(cuda["problem"]))
    return {"cuda": cuda, "engine": found.get("engine")}
