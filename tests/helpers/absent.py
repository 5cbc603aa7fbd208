"""Packages that are not installed, as far as this process can tell."""

import sys

from fastrack._tensors import arrays


class _Hiding:
    """A finder of modules, and of what is installed, that does not find some packages."""

    def __init__(self, finder, packages):
        self._finder, self._packages = finder, packages

    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in self._packages else self._finder.find_spec(name, *rest)

    def find_distributions(self, context):
        found = getattr(self._finder, "find_distributions", lambda _: ())(context)
        return (one for one in found if one.name.lower().replace("-", "_") not in self._packages)


def hide(patch, *packages):
    """Have packages be neither found nor imported, nor be imported already, until a patch is undone.

    What is known of frameworks is asked again then: see the fixture `hide`.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            patch.delitem(sys.modules, name)
    patch.setattr(sys, "meta_path", [_Hiding(finder, packages) for finder in sys.meta_path])
    arrays.installed.cache_clear()
