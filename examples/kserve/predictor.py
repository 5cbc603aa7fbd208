"""A model server of KServe, as it is without fastrack: it reads weights with safetensors from a folder."""

import argparse
from pathlib import Path
from typing import Any

import kserve
import torch
from safetensors.torch import load_file


class Network(kserve.Model):
    """Two layers, which answer with the logits of each instance."""

    def __init__(self, name: str, folder: str) -> None:
        super().__init__(name)
        weights = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            weights |= load_file(file)
        rows, columns = weights["0.weight"].shape
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(columns, rows), torch.nn.ReLU(), torch.nn.Linear(rows, len(weights["2.bias"]))
        )
        self.layers.load_state_dict(weights)
        self.ready = True

    @torch.inference_mode()
    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> dict[str, Any]:
        return {"predictions": self.layers(torch.tensor(payload["instances"])).tolist()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[kserve.model_server.parser])
    parser.add_argument("--model_dir", default="/mnt/models")
    options = parser.parse_args()
    kserve.ModelServer().start([Network(options.model_name, options.model_dir)])
