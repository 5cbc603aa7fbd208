"""Make fastrack's native extension: numba lowers loops, and LLVM IR of our own is the cipher.

``python -m fastrack_native`` runs once, when a wheel is built or a checkout is made ready. A package does not have it.
"""
