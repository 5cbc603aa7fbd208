"""``python -m bench.gpu.stage PATH``: run the stage whose empty document is there, in this process."""

import faulthandler
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from bench.gpu import stages
from bench.gpu.plan import FULL, QUICK
from bench.gpu.processes import exit_on_sigterm
from bench.gpu.record import Record


class Stage:
    """Hold the arguments of a stage: the path of its document, the record for rows, the device and the plan."""

    def __init__(self, path, plan=None):
        self.path, self.record = path, Record(path)
        document = self.record.document
        self.device = document["device"]
        self.plan = plan or (QUICK if document["quick"] else FULL)
        if document.get("budget"):
            self.plan = replace(self.plan, budget=document["budget"])

    @cached_property
    def gpu(self):
        """Return the GPU, opened at the first use."""
        from bench.gpu.gpu import Gpu

        self.record.gpu = gpu = Gpu(self.device)
        return gpu


def main(argv):
    exit_on_sigterm()
    stage = Stage(Path(argv[0]))
    # Should a call hang, the log says where every thread stood.
    faulthandler.dump_traceback_later(max(stage.record.left - 1, 1), file=sys.__stderr__)
    stages.run(stage)


if __name__ == "__main__":
    main(sys.argv[1:])
