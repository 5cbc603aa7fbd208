"""Seal and open bytes: the message format, and the engines of the host."""
