"""Readers of plain safetensors that are made for speed: Run:ai's model streamer, and obstore.

Features: those of plain safetensors. Run:ai's documentation of SafetensorsStreamer (several threads read a file into
memory of its own, and tensors are taken from there); obstore's of `get`. The `prefetch` of safetensors 0.9 is only for
CUDA: on "cpu" it is refused (tried).
"""

from pathlib import Path

from bench.peers.safetensors import Safetensors


class RunAi(Safetensors):
    """As many threads as it chooses."""

    name, package = "Run:ai model streamer", "runai-model-streamer"
    settings = "safetensors.torch.save_file; SafetensorsStreamer.stream_file and get_tensors, 16 threads by its default"

    def __init__(self):
        super().__init__()
        from runai_model_streamer import SafetensorsStreamer

        self._streamer = SafetensorsStreamer

    def open(self, path):
        with self._streamer() as streamer:
            streamer.stream_file(str(path))
            return dict(streamer.get_tensors())


class Obstore(Safetensors):
    """One request for the whole file."""

    name, package = "obstore, read", "obstore"
    settings = "safetensors.torch.save_file; obstore.get from a LocalStore, and safetensors.torch.load of its bytes"

    def __init__(self):
        super().__init__()
        import obstore

        self._obstore = obstore

    def open(self, path):
        path = Path(path)
        store = self._obstore.store.LocalStore(str(path.parent))
        return self._files.load(bytes(self._obstore.get(store, path.name).bytes()))
