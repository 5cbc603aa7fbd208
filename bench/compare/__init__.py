"""Is the working tree slower than a revision? ``make bench-compare BASE=<revision>`` runs it."""


class CannotCompareError(Exception):
    """There is no comparison to be had; the message says what to do."""
