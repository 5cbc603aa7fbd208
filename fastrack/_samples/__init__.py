"""Samples: data sets as shards, and their import from other formats."""
