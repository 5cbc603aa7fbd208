"""Put the emulator under every Python with this folder on its path, and let the stages of `make gpu` measure little."""

from emulator.attach import Emulator
from helpers.stand_in_gpu import TINY

from bench.gpu import plan

emulator = Emulator()
plan.FULL = plan.QUICK = TINY
