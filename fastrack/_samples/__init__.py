"""Samples: data sets as shards, and what they are imported from."""
