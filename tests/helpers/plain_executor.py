"""An executor that is not of fastrack, and sends plain weights."""

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.executor import Executor


class PlainExecutor(Executor):
    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        return DXO(DataKind.WEIGHTS, data={"layer.weight": np.ones(4, np.float32)}).to_shareable()
