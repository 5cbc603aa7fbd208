"""Utilities that know neither tensors nor cryptography: files, forks, guards, trees, traces."""
