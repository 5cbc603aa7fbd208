"""Take one model to three holders of data, each of them a process, and compare it with training in one place.

    python -m examples.tour digits     handwritten digits of scikit-learn, a third at each holder
    python -m examples.tour text       a character model on the text of the standard library
    python -m examples.tour refusal    a holder in the middle refuses
    python -m examples.tour all

The evidence is signed by stand-ins of Intel and NVIDIA from this project's tests: see stand_ins.py.
"""

import argparse
import os
import sys

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # parties are forked, and compare sums to the bit

import starlette.applications  # noqa: F401
import torch._dynamo  # noqa: F401 - optimizers import it at their first step
import uvicorn  # noqa: F401

from examples.tour import digits, journey, text
from fastrack import tour

IMPORTED = [
    getattr(tour, name) for name in tour.__all__
]  # once, like the above, and not in each process that is forked

TOURS = {
    "digits": lambda: journey.whole(digits, ("ada", "ben", "cleo") * 2),
    "text": lambda: journey.whole(text, ("ada", "ben", "cleo")),
    "refusal": lambda: journey.refused(digits, ("ada", "ben", "cleo")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tour", choices=[*TOURS, "all"])
    chosen = parser.parse_args().tour
    results = []
    for name in TOURS if chosen == "all" else (chosen,):
        print(f"— {name} —", flush=True)
        results.append(TOURS[name]())
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
