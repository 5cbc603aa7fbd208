"""``fastrack qualify``, which `fastrack-bench` has: what attacks a folder is no part of what serves it."""


def qualify() -> None:
    """Attack a sealed folder on the machine that will serve it, row by row, and sign what was seen."""
