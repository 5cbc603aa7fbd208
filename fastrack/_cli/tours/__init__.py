"""The commands of tours: ``fastrack tour``."""
