"""Print the tables of `docs/_collectives.md` from the results of ``fastrack bench --collectives``.

``fastrack bench --collectives --json out.json --picture docs/_collectives.png``, with `out.json` in `bench/results/`,
then ``python -m bench.collectives out.json >docs/_collectives.md``.
"""

import json
import sys
from itertools import groupby
from pathlib import Path

from fastrack._util.units import format_size

STEPS = ("seal", "wait", "open", "add", "drain", "confirm", "other")
BEGIN = "<!-- Made by `python -m bench.collectives` from the JSON of a full run of `fastrack bench --collectives`. -->"

PICTURE = "![Times of collectives and of iterations relative to gloo, and the steps of a collective](_collectives.png)"


def main():
    sys.stdout.write(tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))


def tables(document):
    """Return a table of times and one of steps."""
    rows = document["collectives"]
    steps = ["Milliseconds by step on rank 0:", "", *_steps(rows)]
    return "\n".join([BEGIN, "", PICTURE, "", *_times(rows), "", *steps, ""])


def _times(rows):
    ways = ("gloo", "plain", "naive", "sealed", "alone")
    yield f"| | size | ranks | gloo, ms | {' | '.join(f'{way} ÷ gloo' for way in ways[1:])} | naive ÷ sealed |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for (subject, size, ranks), group in groupby(
        _sorted(rows), key=lambda row: (row["subject"], row["size"], row["ranks"])
    ):
        by_way = {row["way"]: row for row in group}
        ratios = [f"{by_way[way]['over_gloo']:.2f}" if way in by_way else "" for way in ways[1:]]
        ratio = by_way["naive"]["seconds"] / by_way["sealed"]["seconds"]
        times = f"{1000 * by_way['gloo']['seconds']:.1f}"
        yield f"| {subject} | {format_size(size)} | {ranks} | {times} | {' | '.join(ratios)} | {ratio:.2f} |"


def _steps(rows):
    yield f"| | size | ranks | way | {' | '.join(STEPS)} |"
    yield f"|---|---:|---:|---|{'---:|' * len(STEPS)}"
    largest = max(row["size"] for row in rows if row["subject"] == rows[0]["subject"])
    for row in _sorted(rows):
        if row["steps"] and (row["subject"] != rows[0]["subject"] or row["size"] == largest):
            steps = " | ".join(f"{1000 * row['steps'][step]:.1f}" for step in STEPS)
            yield f"| {row['subject']} | {format_size(row['size'])} | {row['ranks']} | {row['way']} | {steps} |"


def _sorted(rows):
    """Return the rows by subject, size and ranks, subjects in the order of measurement."""
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    return sorted(rows, key=lambda row: (subjects.index(row["subject"]), row["size"], row["ranks"]))


if __name__ == "__main__":
    main()
