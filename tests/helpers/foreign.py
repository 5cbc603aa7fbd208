"""Functions of other libraries, which the library replaces while it is in use, and for good as it protects."""

from fastrack._patches import attributes


def mark():
    """Return how many changes there are, for `take_back`."""
    return len(attributes._steps)


def take_back(until=0):
    """Take back all changes, the last one first, until so many are left. Modules imported since keep their copies."""
    while len(attributes._steps) > until:
        attributes._steps.pop()[0]()
