"""Bounded readers for the formats of evidence, and for certificates."""
