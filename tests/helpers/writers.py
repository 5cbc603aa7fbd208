"""Add what the packages of this environment write with to ``fastrack/_protect/writers.txt``: `make writers`.

Run it for each version that was tried, and torch's builds with and without CUDA: what it lists is compared with what an
unknown version has.
"""

import sys

from fastrack._protect import versions


def accept():
    """Add the installed packages as tried versions, and return those that were added."""
    listed = versions.tried_surfaces() if versions.WRITERS.exists() else {}
    added = []
    for name in versions.COVERED:
        for version in versions.versions_of(name)[:1]:
            minor = ".".join(map(str, versions.minor_of(version)))
            listed.setdefault(name, {}).setdefault(minor, set()).update(versions.surface(name))
            added.append(f"{name} {minor}")
    versions.WRITERS.write_text("".join(f"{line}\n" for line in lines_of(listed)))
    return added


def lines_of(listed):
    """Yield the lines of a list: the versions that have some functions, and these."""
    for name, surfaces in listed.items():
        held = {}
        for function in sorted(set().union(*surfaces.values())):
            held.setdefault(tuple(version for version in surfaces if function in surfaces[version]), []).append(
                function
            )
        for versions_with, functions in sorted(held.items(), key=lambda each: (-len(each[0]), each[0])):
            yield f"[{' '.join((name, *versions_with))}]"
            yield from functions


if __name__ == "__main__":
    sys.stdout.write("".join(f"{name}\n" for name in accept()))
