"""The real CuPy on an emulated CUDA: ``make emulator``, or ``python -m emulator`` in its environment. See README.md."""
