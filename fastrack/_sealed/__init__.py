"""Sealed tensors in memory, and handles on parts of them."""
