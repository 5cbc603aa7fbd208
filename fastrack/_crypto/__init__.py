"""Seal and open bytes: the message format, keys, and the engines of the host."""
