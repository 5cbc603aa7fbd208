"""Program that strains saves of the Trainer of transformers: ``trainer_strains.py kills|memory FOLDER [sealed]``.

``kills`` kills processes at random moments of their saves and resumes each run from its last whole checkpoint.
``memory`` prints the peak of resident memory over a save, in bytes above the memory before it.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from helpers.trainer_runs import begin, hf_trainer


def kills(folder):
    """Kill 50 processes, and print how many whole checkpoints were resumed from, and how many folders were partial."""
    hf_trainer(folder / "none", width=192)  # imports what each process would import again
    draw, resumed, partial = random.Random(4), 0, 0
    for number in range(50):
        place = folder / str(number)
        child = fork(lambda place=place: hf_trainer(place, steps=1000, save_total_limit=3, width=192).train())
        while not any(is_whole(path) for path in place.glob("checkpoint-*")):
            if os.waitpid(child, os.WNOHANG)[0]:
                raise SystemExit("a process ended before its first checkpoint")
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = sorted(place.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        whole = [path for path in found if is_whole(path)]
        partial += len(found) - len(whole)
        again = fork(lambda path=whole[-1]: resume(path, folder / "again"))
        if os.waitpid(again, 0)[1]:
            raise SystemExit(f"no run resumes from {whole[-1]}")
        resumed += 1
        shutil.rmtree(place)
        shutil.rmtree(folder / "again", ignore_errors=True)
    sys.stdout.write(json.dumps({"resumed": resumed, "partial": partial}) + "\n")


def resume(path, folder):
    """Train one more step."""
    step = int(path.name.partition("-")[2])
    hf_trainer(folder, steps=step + 1, width=192).train(resume_from_checkpoint=str(path))


def is_whole(path):
    """Return whether the Trainer wrote the last file of a checkpoint, which is text."""
    try:
        json.loads((path / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True


def fork(run):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run()
        status = 0
    finally:
        os._exit(status)


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4096, 4096, bias=False) for _ in range(11))  # 704 MiB

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x - labels).square().mean()}


def memory(folder):
    """Train two steps of a model whose checkpoint has over 2 GiB, and save after each; the second is measured."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), max_steps=2, save_steps=1, per_device_train_batch_size=1, use_cpu=True, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, save_total_limit=1,
    )  # fmt: skip
    data = [{"x": torch.randn(4096), "labels": torch.ones(4096)}] * 2
    trainer = Trainer(Wide(), arguments, train_dataset=data)
    save, over = trainer._save_checkpoint, []

    def measured(*arguments, **options):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        save(*arguments, **options)
        over.append(resident("VmHWM") - before)

    trainer._save_checkpoint = measured
    trainer.train()
    size = sum(path.stat().st_size for path in (folder / "checkpoint-2").iterdir())
    sys.stdout.write(json.dumps({"over": over, "size": size}) + "\n")


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    begin()
    {"kills": kills, "memory": memory}[sys.argv[1]](Path(sys.argv[2]))
