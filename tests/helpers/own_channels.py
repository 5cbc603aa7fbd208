"""Channels of the process, which calls share that are given none."""

from fastrack._transfer import api


def share(patch, channels=None):
    """Have the process share these channels, by their devices, or none yet. Return what keeps them."""
    shared = api._Shared()
    shared.channels.update(channels or {})
    patch.setattr(api, "_shared", shared)
    return shared
