"""Utilities without tensors or cryptography: files, forks, guards, trees, traces."""
