"""``python -m bench.gpu``: run each stage in a process of its own, with a line of JSON. Takes no package."""

import argparse
import json
import os
import sys
from pathlib import Path

from bench.gpu import needs, record, summary
from bench.gpu.processes import ROOT, exit_on_sigterm, run, watch
from bench.gpu.stages import STAGES

SECONDS = 540
PYTHON = (sys.executable, "-m")
_MARGIN = 15  # seconds between the end of a stage's own time and the end of its process
_PROBE = 120


def main(argv):
    """Run the stages. Gives 0, 1 if a check failed, or 2 if there is no device to use."""
    exit_on_sigterm()
    options = _parse(argv)
    vital, other = needs.missing()
    for sentence in other:
        print(sentence, file=sys.stderr)
    if vital:
        return _nothing(options, f"{sys.executable} lacks something: {', '.join(vital)}")
    code, output = run([*PYTHON, "bench.gpu.machine", options.device], _PROBE)
    if code != 0:
        return _nothing(options, f"not done after {_PROBE} s" if code is None else output.strip())
    machine = json.loads(output.splitlines()[-1])
    os.environ.setdefault("CUPY_CACHE_DIR", str(options.out / "cubins"))  # the machine code is kept with the results
    status = int(any([_run(stage, machine, options) == record.FAILED for stage in options.stages]))  # noqa: C419 - all run
    # In a process of its own: it needs NumPy, and what it reads may be of another version.
    print(run([*PYTHON, "bench.gpu.decide", str(options.out)], _PROBE)[1], file=sys.stderr, end="")
    return status


def _run(stage, machine, options):
    print(f"{stage}: {STAGES[stage]} (at most {options.seconds:g} s)", file=sys.stderr, flush=True)
    settings = {"device": options.device, "quick": options.quick, "seconds": max(options.seconds - _MARGIN, 1)}
    settings["budget"] = options.budget
    path = record.create(options.out, stage, machine, **settings)
    with watch(machine["gpu"].get("bus"), path.with_suffix(".csv")):
        code, output = run([*PYTHON, "bench.gpu.stage", str(path)], options.seconds)
    document = record.settle(path, code, output, options.seconds)
    print(summary.line(document, path.name), flush=True)
    return document["outcome"]


def _parse(argv):
    listed = "\n".join(f"  {name:9} {what}" for name, what in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Check and measure fastrack on a GPU, in stages.",
        epilog=f"stages:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="NAME", help="all of them")
    parser.add_argument("--device", default="cuda:0", help="which GPU: cuda:N")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"that a stage may take; {SECONDS} by default")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds that a comparison may take: fewer rounds")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    options = parser.parse_args(argv)
    options.out = options.out.resolve()  # stages run in the root of the checkout
    return options


def _nothing(options, why):
    print(f"There is no usable CUDA device: {why}\nskipped: {', '.join(options.stages)}")
    print("docs/gpu.md says what a machine needs for `make gpu`.")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
