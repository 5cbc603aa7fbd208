"""The version. CITATION.cff repeats it, and a test compares the two."""

__version__ = "0.3.0"
