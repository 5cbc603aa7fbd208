"""Seal and open tensors on the host, and the files that hold them."""
