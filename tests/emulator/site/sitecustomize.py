"""Put the emulator under every Python with this folder on its path, and let the stages of `make gpu` measure little."""

from emulator.attach import Emulator
from helpers.stand_in_gpu import TINY

from bench.gpu import candidates, plan

emulator = Emulator()
plan.FULL = plan.QUICK = TINY
# Whatever CuPy compiles, the kernels of the tree run: those of another shape are left to tests/kernels.
candidates.names = lambda: ["rolled", "stagger"]
