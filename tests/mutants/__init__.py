"""Mutants of the CUDA kernels: ``python -m mutants``."""
