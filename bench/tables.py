"""Write the tables of the documentation from committed results and the model of tolls: ``python -m bench.tables``.

Each table is a file `docs/_NAME.md`, which pages include. After a new run put its JSON into `bench/results/`, change
the file's name in `TABLES`, and run this again.
"""

import json
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median

from fastrack._util.shown import format_size
from fastrack_bench import crossings, toll
from fastrack_bench.prediction.profiles import parse_profile
from fastrack_bench.prediction.validation import CLASSES, REFUSED, leave_out, leave_out_rows, reach_past

ROOT = Path(__file__).parents[1]
MIB = 2**20
DIRECTIONS = {"to_device": "to the device", "to_host": "back"}
WAYS = ("plain", "naive", "sealed", "alone")
CASE = ("model", "mode", "batch")


def ablation(document):
    """Return the steps from the bounce path to fastrack, at the smallest, a middle and the largest size."""
    sizes = sorted({row["size"] for row in document["ablation"]})
    kept = {sizes[0], sizes[len(sizes) // 2], sizes[-1]}
    yield ["", "size", "step", "ms", "GB/s", "× bounce", "of the copy"]  # noqa: RUF001
    for row in document["ablation"]:
        if row["size"] in kept:
            place = (DIRECTIONS[row["direction"]], format_size(row["size"]), row["step"])
            yield [
                *place,
                *_times(row["p50"], row["gbps"]),
                f"{row['over_bounce']:.2f}",
                f"{100 * row['of_copy']:.0f} %",
            ]


def figures(document):
    """Return every path to the device, at the largest size."""
    yield ["path", "ms", "GB/s", "× bounce", "of the plain copy"]  # noqa: RUF001
    for row in document["paths"]:
        ratios = ["", ""] if row["of_copy"] is None else [f"{row['over_bounce']:.2f}", f"{100 * row['of_copy']:.0f} %"]
        yield [row["path"], f"{1000 * row['seconds']:.1f}", f"{row['gbps']:.2f}", *ratios]


def peers(document):
    """Return the speed, the memory and the size on disk of fastrack and of others."""
    yield ["", "version", "seal, GB/s", "synced too", "open, GB/s", "memory to seal, MiB", "to open, MiB", "larger by"]
    nbytes = document["bytes"]
    for peer in document["peers"]:
        speeds = [f"{nbytes / median(peer[what]) / 1e9:.2f}" for what in ("seal", "synced", "open")]
        beyond = [peer["seal_owned"], max(0, peer["open_owned"] - nbytes)]
        memory = [f"{value / MIB:.0f}" for value in beyond]
        over = f"{100 * (peer['bytes'] - nbytes) / nbytes:.3f} %"
        yield [
            peer["name"],
            peer["version"],
            *speeds[:2],
            speeds[2] if peer["is_read"] else "reads nothing",
            *memory,
            over,
        ]


def features(document):
    """Return what each way to keep tensors protects, as it was tried."""
    yield ["", "a bit changed", "cut or reordered", "random access", "commits to its key", "names, dtypes, shapes"]
    found = {}
    for peer in document["peers"]:
        has = peer["features"]
        name, flip = peer["name"].partition(",")[0], peer["flip"] or "not tried"
        found.setdefault(
            tuple(has.values()),
            [name, flip, has["order_and_end"], has["random_access"], has["key_commitment"], has["metadata"]],
        )
    yield from found.values()


def collectives(document):
    """Return the times of one bucket and of training, relative to gloo."""
    rows = [row for row in document["collectives"] if row["subject"] != "all-reduce" or row["size"] == 25 * MIB]
    yield ["", "size", "ranks", "gloo, ms", *(f"{way} ÷ gloo" for way in WAYS)]
    for (subject, size, ranks), group in groupby(_sorted(rows), key=_measured):
        by_way = {row["way"]: row for row in group}
        ratios = [f"{by_way[way]['over_gloo']:.2f}" if way in by_way else "" for way in WAYS]
        yield [subject, format_size(size), str(ranks), f"{1000 * by_way['gloo']['seconds']:.1f}", *ratios]


def workloads(document):
    """Return the time of a step of each case over that with a plain copy, by way."""
    yield ["", "compute, ms", "plain, ms", "bounce ÷ plain", "direct ÷ plain", "A/A", "saved of the overhead"]
    for (model, mode, batch), group in groupby(document["workloads"], key=lambda row: tuple(map(row.get, CASE))):
        rows = {row["way"]: row for row in group}
        plain, direct = rows["plain"], rows["direct"]
        again = [row["again"] for row in rows.values()]
        yield [
            f"{model}, {mode}, {batch}",
            f"{1e3 * plain['compute']:.2f}",
            f"{1e3 * plain['step']:.2f}",
            f"{rows['bounce']['over_plain']:.3f}",
            f"{direct['over_plain']:.3f}",
            f"{min(again):.3f} to {max(again):.3f}",
            f"{100 * direct['removed']:.0f} %",
        ]


def visits(document):
    """Return the seconds of each buffer in both ways, shares beside modelled training, and those of the paper."""
    measured = [row for row in document["visits"] if row["row"] == "measured"]
    paper = {row["buffer"]: row for row in document["visits"] if row["row"] == "paper" and row["modelled"] is not None}
    shares = ["bounce, % of 1230 s", "sealed", "bounce, % beside images", "sealed", "paper, %", "its model"]
    yield ["buffer", "buffers", "bounce, s", "sealed, s", "sealed ÷ bounce", "A/A", *shares]
    for buffer, group in groupby(measured, key=lambda row: row["buffer"]):
        bounce, sealed = rows = list(group)
        known = paper[buffer]
        yield [
            "uncapped" if buffer is None else f"{buffer / 1e6:g} MB",
            str(bounce["buffers"]),
            *(f"{row['seconds']:.3f}" for row in rows),
            f"{sealed['over_bounce']:.2f}",
            f"{bounce['again']:.2f}; {sealed['again']:.2f}",
            *(f"{100 * row['share']:.3f}" for row in rows),
            *(f"{100 * row['share_heavy']:.1f}" for row in rows),
            f"{100 * known['share']:.3f}",
            f"{100 * known['modelled']:.3f}",
        ]


def fuzzed(*documents):
    """Return what each target of the fuzzer was given."""
    yield ["target", *(f"inputs, run {number}" for number in range(1, len(documents) + 1)), "branches", "crashes"]
    by_run = [{row["target"]: row for row in document["targets"]} for document in documents]
    for name in dict.fromkeys(name for run in by_run for name in run):
        rows = [run.get(name) for run in by_run]
        inputs = [f"{row['inputs']:,}" if row else "" for row in rows]
        there = [row for row in rows if row]
        yield [f"`{name}`", *inputs, str(max(row["edges"] for row in there)), str(sum(row["crashes"] for row in there))]


def soaked(document):
    """Return the faults that were injected, and those of them that were noticed."""
    yield ["fault", "injected", "caught"]
    for name, row in document["faults"].items():
        yield [name, f"{row['injected']:,}", f"{row['caught']:,}"]
    yield ["all", *(f"{sum(row[what] for row in document['faults'].values()):,}" for what in ("injected", "caught"))]


def plan(*documents):
    """Return how far off the predictions of `fastrack plan` are for sizes that are left out, of each machine."""
    yield ["", "left out", "sizes", "neighbours apart", "error", "noise", "bytes ÷ bandwidth", "runs covered"]
    for machine, document in zip(PLANNED, documents, strict=True):
        profile = parse_profile(document, machine)
        trials = {"sizes": leave_out(profile), "sizes of every second": leave_out(profile, every=2)}
        trials |= {"rows of one size": leave_out_rows(profile), "all past a quarter": reach_past(profile)}
        for name, found in trials.items():
            for each in found.summaries():
                is_class = name == "sizes" and (each.of in CLASSES or profile.machine.caches is not None)
                if each.of in {"all", REFUSED} or is_class:
                    noise = "" if each.noise is None else _errors(each.noise)
                    of = name if each.of == "all" else f"{name}, {each.of}"
                    counts = str(each.trials), f"{each.gap:.0f}"
                    covered = f"{100 * each.covered:.0f} %"
                    yield [machine, of, *counts, _errors(each.error), noise, _errors(each.baseline), covered]


def calls(rows=crossings.call_tolls, unit="µs", digits=0):
    """Return the copies of each call in confidential mode by each way, and its modelled time over each bridge."""
    bridges = [f"{name}, {unit}" for name in toll.load_data()["bridges"]]
    yield ["", "by", "copies in + out / launches and fills", *bridges]
    made = {}
    for row in rows():
        made.setdefault((row.call, row.way), []).append(row)
    for (call, way), (row, *more) in made.items():
        if way != crossings.BEFORE:  # of a version before
            counts = row.counts
            copies = f"{counts.uploads} + {counts.downloads} / {counts.launches + counts.fills}"
            times = [f"{each.seconds * (1e6 if unit == 'µs' else 1e3):.{digits}f}" for each in (row, *more)]
            yield [call, way.removesuffix(" after"), copies, *times]


PLANNED = {
    "Zen 4": "2026-11-28-plan-cpu-epyc-zen4-2cores",
    "Zen 5, `bench`": "2026-11-21-bench-cpu-epyc-zen5-2cores",
    "Zen 4, table of paths": "2026-11-21-cpu-epyc-zen4-2cores",
    "Xeon, `bench --collectives`": "2026-11-22-collectives-cpu-xeon-avx512-2cores",
}
TABLES = {
    "ablation": (ablation, "2026-11-30-bench-cpu-epyc-zen4-2cores"),
    "figures": (figures, "2026-11-30-bench-cpu-epyc-zen4-2cores"),
    "peers": (peers, "2026-11-28-peers-cpu-epyc-2cores"),
    "features": (features, "2026-11-28-peers-cpu-epyc-2cores"),
    "collectives": (collectives, "2026-11-22-collectives-cpu-xeon-avx512-2cores"),
    "plan": (plan, *PLANNED.values()),
    "fuzzed": (fuzzed, "2026-11-21-fuzz-cpu-epyc-zen5-2cores", "2026-11-22-fuzz-cpu-xeon-avx512-2cores"),
    "workloads": (workloads, "2026-11-28-workloads-cpu-epyc-zen4-2cores"),
    "visits": (visits, "2026-11-28-visits-cpu-epyc-2cores"),
    "soaked": (soaked, "2026-11-22-soak-cpu-xeon-2cores"),
    "calls": (calls,),
    "kv": (partial(calls, crossings.kv_tolls, "ms", 1),),
}


def write(name):
    """Return the text of a table."""
    table, *files = TABLES[name]
    documents = [json.loads((ROOT / f"bench/results/{file}.json").read_text(encoding="utf-8")) for file in files]
    source = ", ".join(files) or "the model of `fastrack bench --toll`"
    return f"<!-- Made by `python -m bench.tables` from {source}. -->\n\n{markdown(table(*documents))}"


def markdown(rows):
    """Return rows as a table of Markdown, numbers to the right."""
    head, *rest = rows
    rest = [*rest]
    is_number = [all(row[at][:1] in "0123456789-" for row in rest) for at in range(len(head))]
    rule = ["---:" if number else "---" for number in is_number]
    lines = [head, rule, *rest]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _times(seconds, gbps):
    return f"{1000 * seconds:.{3 if seconds < 1e-3 else 1}f}", f"{gbps:.2f}"


def _errors(pair):
    return f"{100 * pair[0]:.1f}; {100 * pair[1]:.1f} %"


def _measured(row):
    return row["subject"], row["size"], row["ranks"]


def _sorted(rows):
    """Return the rows by subject, size and ranks, subjects in the order of measurement."""
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    return sorted(rows, key=lambda row: (subjects.index(row["subject"]), row["size"], row["ranks"]))


def main():
    """Write all tables."""
    for name in TABLES:
        (ROOT / f"docs/_{name}.md").write_text(write(name), encoding="utf-8")


if __name__ == "__main__":
    main()
