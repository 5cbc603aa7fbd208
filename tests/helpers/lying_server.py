"""A filter by which the server sends sites another folder than the last."""

from pathlib import Path

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.filter import Filter


class OtherFiles(Filter):
    def __init__(self, paths):
        super().__init__()
        self.paths = paths

    def process(self, shareable, fl_ctx):
        files = {name: np.frombuffer(Path(path).read_bytes(), np.uint8) for name, path in self.paths.items()}
        other = DXO(DataKind.APP_DEFINED, data=files).to_shareable()
        shareable["DXO"] = other["DXO"]
        return shareable
