"""Run a module on the emulator: ``python -m emulator MODULE ARGUMENT...``, as ``python -m`` does without it."""

import runpy
import sys

from emulator.attach import Emulator

VIOLATED = 70  # the exit status after uses that CUDA forbids, where the module itself was content

emulator = Emulator()


def main():
    sys.argv = sys.argv[1:]
    status = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = error.code
    if emulator.violations and not status:
        status = VIOLATED
    sys.exit(status)


if __name__ == "__main__":
    sys.modules["emulator.__main__"] = sys.modules["__main__"]
    main()
