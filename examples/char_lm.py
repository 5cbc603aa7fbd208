"""Train a small language model, character by character, on sealed source code: that of Python's standard library.

    python examples/char_lm.py
    python examples/char_lm.py --steps 2000 --width 256

A sealed checkpoint is saved after half of the steps. A second run resumes from it, and must end with the same weights.
"""

import argparse
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import fastrack

SIZE = 65  # characters of a window; the model predicts each from those before it
BATCH = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128, help="size of the model's memory")
    options = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing by more

    with tempfile.TemporaryDirectory() as folder:
        key = fastrack.Key.generate()
        path, saved = Path(folder) / "text.safetensors", Path(folder) / "half.safetensors"
        alphabet = seal_text(path, key)
        data = fastrack.SealedDataset(path).windows("text", SIZE)
        print(f"{len(data)} sealed windows of {SIZE} characters, {len(alphabet)} kinds of them")

        run = Run(alphabet, options.width)
        half = options.steps // 2
        run.train(data, key, half)
        fastrack.save_checkpoint(saved, run.state(), key=key)
        run.train(data, key, options.steps)

        resumed = Run(alphabet, options.width)
        resumed.restore(fastrack.load_checkpoint(saved, keys=key))
        resumed.train(data, key, options.steps, is_quiet=True)
    same = resumed.losses == run.losses and all(map(torch.equal, resumed.weights(), run.weights()))
    print(f"resumed at step {half}: {'the same losses and weights' if same else 'DIFFERENT'}, bit for bit")
    print(f"\n{run.sample('def ', 200)}")
    return 0 if same else 1


def seal_text(path: Path, key: fastrack.Key) -> bytes:
    """Seal the text as numbers of characters, and return its distinct characters."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    alphabet, tokens = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    fastrack.save_file({"text": tokens.astype(np.uint8)}, path, key=key)
    return alphabet.tobytes()


class Model(nn.Module):
    def __init__(self, kinds: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(kinds, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.guess = nn.Linear(width, kinds)

    def forward(self, tokens: torch.Tensor, memory: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        seen, memory = self.memory(self.embed(tokens), memory)
        return self.guess(seen), memory


class Run:
    """A training run: the model, its optimizer and the losses so far."""

    def __init__(self, alphabet: bytes, width: int) -> None:
        torch.manual_seed(0)
        self.alphabet = alphabet
        self.model = Model(len(alphabet), width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.losses: list[float] = []

    def train(self, data: Any, key: fastrack.Key, steps: int, *, is_quiet: bool = False) -> None:
        """Train until this number of steps is done."""
        done = len(self.losses)
        order = torch.randint(len(data), (steps, BATCH), generator=torch.Generator().manual_seed(0))
        loader = DataLoader(data, batch_sampler=order[done:].tolist(), collate_fn=fastrack.collate)
        for step, batch in enumerate(fastrack.wrap(loader, keys=key), done + 1):
            tokens = batch["text"].long()
            guesses, _ = self.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(guesses.flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
            if not is_quiet and (step == 1 or step % max(1, steps // 5) == 0):
                print(f"step {step}: loss {loss.item():.3f}", flush=True)

    def state(self) -> dict[str, Any]:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**states, "losses": self.losses, "alphabet": self.alphabet}

    def restore(self, state: dict[str, Any]) -> None:
        self.alphabet = state["alphabet"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]

    def weights(self) -> list[torch.Tensor]:
        return list(self.model.state_dict().values())

    @torch.no_grad()
    def sample(self, start: str, count: int) -> str:
        """Let the model continue a text."""
        tokens = torch.tensor([[self.alphabet.index(character) for character in start.encode()]])
        text, memory = start.encode(), None
        for _ in range(count):
            guesses, memory = self.model(tokens, memory)
            tokens = torch.multinomial((guesses[:, -1] / 0.7).softmax(-1), 1)
            text += bytes([self.alphabet[int(tokens)]])
        return text.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
