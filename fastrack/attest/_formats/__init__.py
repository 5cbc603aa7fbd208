"""Formats that evidence comes in, and certificates, as bounded readers."""
