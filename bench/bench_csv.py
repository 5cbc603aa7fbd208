"""Import of a CSV table: processor time with PyArrow and without it, against the reader of version 0.2, in turns.

Run as `python bench/bench_csv.py [--rows 300000] [--repeat 5]`. Ends with 1 if a target is missed.
"""

import argparse
import csv
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow.csv  # noqa: F401 - before the first turn

from bench import csv_before
from fastrack import Key, import_samples
from fastrack._samples.csv import csv_arrow, csv_files

BEFORE, WITHOUT, WITH = "0.2", "without PyArrow", "with PyArrow"
TARGETS = {WITHOUT: 1.0, WITH: 1 / 3}  # of the time that 0.2 takes
WAYS = {
    BEFORE: (csv_files, "read_files", csv_before.read_files),
    WITHOUT: (csv_arrow, "_WORTH", sys.maxsize),
    WITH: (csv_arrow, "_WORTH", 0),
}


def write_table(path, rows):
    """Write ten columns: six of text, one of them quoted, two of integers and two of numbers, one of 17 digits."""
    draw = random.Random(0)
    cities = ["Berlin", "Zürich", "São Paulo", "New York", "Kraków, Stare Miasto", "Oslo"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "age", "income", "score", "city", "zip", "day", "note", "flag", "count"])
        for row in range(rows):
            note = f"note {row} of the patient" + (' "quoted"' if row % 7 == 0 else "")
            day = f"2020-{row % 12 + 1:02}-{row % 28 + 1:02}"
            numbers = [row, draw.randint(18, 90), round(draw.uniform(1e3, 1e5), 2), repr(draw.random())]
            texts = [draw.choice(cities), f"{draw.randint(0, 99_999):05}", day, note, draw.choice(["true", "false"])]
            writer.writerow([*numbers, *texts, "" if row % 11 == 0 else draw.randint(0, 10**9)])


def measure(rows=300_000, repeat=5):
    """Return the median of the processor time of an import by each reader, in seconds."""
    seconds, key = {way: [] for way in WAYS}, Key.generate()
    with tempfile.TemporaryDirectory() as folder:
        table, target = Path(folder, "table.csv"), Path(folder, "out")
        write_table(table, rows)
        for turn in range(repeat + 1):  # the first one makes pages and files known
            for way, patch in WAYS.items():
                with mock.patch.object(*patch):
                    start = time.process_time()
                    import_samples(table, target, key)
                    spent = time.process_time() - start
                shutil.rmtree(target)
                if turn:
                    seconds[way].append(spent)
    return {way: median(each) for way, each in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    seconds = measure(options.rows, options.repeat)
    for way, spent in seconds.items():
        of = spent / seconds[BEFORE]
        print(f"{way:16} {spent:6.2f} s of a processor, {of:.2f} of {BEFORE}")
    sys.exit(any(seconds[way] > target * seconds[BEFORE] for way, target in TARGETS.items()))


if __name__ == "__main__":
    main()
