"""Checkpoints of training runs, and when to save them."""
