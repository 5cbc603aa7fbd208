"""Is the working tree slower than a revision? ``make bench-compare BASE=<revision>`` runs it."""


class CannotCompareError(Exception):
    """No comparison is possible; the message has advice."""
