"""Measurements that are over soon."""

from fastrack._bench import runner


def shorten(patch):
    """Have sizes be measured as often as was asked for, and not more often where they are small."""
    patch.setattr(runner, "rounds_of", lambda nbytes, repeat: repeat)
