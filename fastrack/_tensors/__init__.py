"""Describe arrays of any framework: memory, dtypes, shapes."""
