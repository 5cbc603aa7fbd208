"""Functions of other libraries, which the library replaces while it is in use."""

from fastrack._patches import attributes


def take_back():
    """Give all functions that were replaced back to the libraries that they are of."""
    attributes.restore()
