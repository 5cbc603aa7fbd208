"""Write the cases, or compare those that are there: `python -m generator [--check]`."""

import sys
from pathlib import Path

from generator.kinds import files

HERE = Path(__file__).parent.parent
INDEX = "cases/SHA256SUMS"


def main(arguments: list[str]) -> int:
    """Write all, or tell what differs."""
    made = files()
    there = {str(path.relative_to(HERE)) for path in (HERE / "cases").rglob("*") if path.is_file()}
    stale = sorted(there - made.keys())
    differing = [
        name for name, data in made.items() if not (HERE / name).is_file() or (HERE / name).read_bytes() != data
    ]
    if arguments == ["--check"]:
        sys.stdout.writelines(f"{name}\n" for name in stale + differing + cases_that_differ(made[INDEX]))
        return 1 if stale or differing else 0
    for name in stale:
        (HERE / name).unlink()
    for name in differing:
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        (HERE / name).write_bytes(made[name])
    return 0


def cases_that_differ(index: bytes) -> list[str]:
    """Return the names of the cases that are new, gone or of another digest than the index that is there has."""
    there = (HERE / INDEX).read_bytes() if (HERE / INDEX).is_file() else b""
    lines = set(there.decode().splitlines()) ^ set(index.decode().splitlines())
    return sorted({line.partition("  ")[2] for line in lines})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
