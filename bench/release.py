"""Measure the figures of a release in one run: ``python -m bench.release FILE [--picture PNG]``.

Takes some three minutes. `fastrack bench` and `python -m bench.targets` run one after the other on the same machine,
which should be idle, and their results become one document in `bench/results/`, of which `python -m bench.tables` makes
tables.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main(argv=None):
    """Measure, and write the document. Targets that are missed are in it; they are no failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="of what each idea brings")
    options = parser.parse_args(argv)
    if options.out.exists():  # results are kept, and a run takes minutes
        parser.error(f"{options.out} exists. Name another file")
    drawn = ["--picture", options.picture] if options.picture else []
    with tempfile.TemporaryDirectory() as folder:
        steps, paths = Path(folder, "bench.json"), Path(folder, "targets.json")
        subprocess.run([sys.executable, "-m", "fastrack", "bench", "--json", steps, *drawn], check=True)
        subprocess.run([sys.executable, "-m", "bench.targets", "--json", paths], check=False)
        found = json.loads(paths.read_bytes())
        largest = max(row["size"] for row in found["rows"])
        rows = [row for row in found["rows"] if row["size"] == largest]
        document = json.loads(steps.read_bytes()) | {"paths": rows, "promised": found["promised"]}
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
