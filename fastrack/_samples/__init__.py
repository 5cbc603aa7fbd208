"""Samples: datasets as shards, and their import from other formats."""
