"""Shrink the largest arrays of tests/gpu, with which kernels on the host take minutes. A pytest plugin."""

MIB = 1 << 20
LARGE = 26 * MIB + 7  # six slabs: each buffer of the staging pool once
SHARED = MIDDLE = 300_000
SLOW = 4 * MIB


def pytest_collection_finish(session):
    """Replace the sizes that the tests read when they run."""
    for module in {item.module for item in session.items if hasattr(item.module, "LARGE")}:
        module.LARGE = LARGE
        for name in ("SHARED", "MIDDLE"):
            if hasattr(module, name):
                setattr(module, name, globals()[name])
    for plugin in session.config.pluginmanager.get_plugins():
        if hasattr(plugin, "SLOW"):
            plugin.SLOW = SLOW
