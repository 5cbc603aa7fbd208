"""Run the command line: ``python -m bench.peers``."""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

from bench.machine import read_machine
from bench.peers.catalog import MEASURE, PEERS
from bench.peers.child import TENSORS
from bench.peers.report import Report
from bench.peers.rounds import measure


def main(argv):
    """Measure, and print. Gives 0, or 1 if fastrack itself could not be measured."""
    options = _parse(argv)
    slugs = [slug for slug in PEERS if not options.only or slug in options.only]
    with tempfile.TemporaryDirectory(prefix="fastrack-peers-", dir=options.folder) as folder:
        results = measure(slugs, options.size, options.rounds, folder)
    machine = read_machine() | {"system": f"{platform.system()} {platform.release()}"}
    report = Report(results, size=options.size, rounds=options.rounds, machine=machine)
    print(f"\n{report.markdown()}")
    if options.json:
        options.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(report.markdown(), encoding="utf-8")
    return int(any(result.slug == MEASURE and not result.is_whole for result in results))


def _parse(argv):
    parser = argparse.ArgumentParser(
        prog="make peers",
        description="Seal the same bytes and bring them back, with fastrack and with what people use now. Each has a "
        "process with the data in it, so all of them together take some 20 times --size of memory.",
    )
    parser.add_argument("--size", type=_size, default=256, metavar="MIB", help="of all tensors (default: 256)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default: 5)")
    parser.add_argument("--only", action="append", choices=PEERS, help="a peer to measure; may be given again")
    parser.add_argument("--folder", type=Path, help="where the files are written (default: the system's)")
    parser.add_argument("--json", type=Path, help="write what was found here too, for programs")
    parser.add_argument("--markdown", type=Path, help="write the tables here too, for the documentation")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return options


def _size(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}: it is divided into {TENSORS} tensors")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
