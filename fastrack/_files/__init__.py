"""Sealed files and folders: reading, writing and checking them."""
