"""Run the real CuPy on an emulated CUDA: ``make emulator``. See README.md."""
