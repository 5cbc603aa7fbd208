"""Tensors that wait sealed: `Vault`, `sealed_activations` and `offload`, each against the same without sealing.

Run as `python bench/bench_vault.py [--repeat 9] [--only vault orders activations offload]`; takes `accelerate` for the
last one. What is compared runs in turns, and medians are given. The machine should be idle.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import nn

import fastrack
from fastrack._bench import paths

MIB = 1 << 20
WIDTHS = {512: (6, 1024), 1024: (4, 768), 2048: (3, 512)}  # layers and tokens, by the width of a model
OFFLOADS = ("Accelerate's disk_offload", "Accelerate's, mapped safetensors", "sealed file", "vault in files")


def in_turns(cases, repeat):
    """Return the seconds of each case, in turns, after one run that does not count."""
    taken = {name: [] for name in cases}
    for number in range(repeat + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if number:
                taken[name].append(time.perf_counter() - start)
    return taken


def report(what, ratios, unit="x"):
    """Print the median of ratios, and between which three quarters of them are."""
    low, _, high = np.percentile(ratios, [12.5, 50, 87.5])
    print(f"{what:58} {median(ratios):6.2f} {unit:2} ({low:.2f} to {high:.2f})", flush=True)


def measure_vault(repeat):
    """Compare putting and getting a tensor with copying it twice, on as many threads."""
    for mib in (16, 64, 256):
        plain = np.random.default_rng(0).integers(0, 256, mib * MIB, np.uint8)
        there, back, vault = np.ones_like(plain), np.ones_like(plain), fastrack.Vault()

        def copy(plain=plain, there=there, back=back):
            paths.copy(there, plain)
            paths.copy(back, there)

        def seal(plain=plain, back=back, vault=vault):
            vault.get(vault.put("block", plain), out=back)

        taken = in_turns({"copies": copy, "vault": seal}, max(repeat, 1024 // mib))
        ratios = [one / other for one, other in zip(taken["copies"], taken["vault"], strict=True)]
        report(f"put and get, {mib} MiB, speed of two copies", ratios)


def measure_orders(repeat):
    """Compare getting 24 tensors of 16 MiB in several orders with getting them in the order of their putting."""
    vault, count = fastrack.Vault(), 24
    tickets = [vault.put("block", np.full(16 * MIB, number, np.uint8)) for number in range(count)]
    out = np.ones(16 * MIB, np.uint8)
    shuffled = random.Random(0).sample(tickets, count)

    def get(order):
        for ticket in order:
            vault.get(ticket, out=out)

    def take(order, taken):
        with vault.prefetch(tickets) as ahead:
            for ticket in order[:taken]:
                ahead.take(ticket)
        get(order[taken:])

    cases = {
        "get, FIFO": lambda: get(tickets),
        "get, LIFO": lambda: get(tickets[::-1]),
        "get, random": lambda: get(shuffled),
        "prefetch, FIFO": lambda: take(tickets, count),
        "prefetch, LIFO": lambda: take(tickets[::-1], count),
        "prefetch, random": lambda: take(shuffled, count),
        "prefetch, FIFO, cancelled after a half": lambda: take(tickets, count // 2),
    }
    taken = in_turns(cases, repeat)
    for name, each in taken.items():
        first = "prefetch, FIFO" if name.startswith("prefetch") else "get, FIFO"
        report(f"{name}, time of {first}", [one / other for one, other in zip(each, taken[first], strict=True)])


def measure_activations(repeat):
    """Compare training steps of transformers of several widths with and without sealed activations."""
    for width, (layers, tokens) in WIDTHS.items():
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        model, vault = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), fastrack.Vault()
        batch = torch.randn(4, tokens // 4, width)

        def plain(model=model, batch=batch):
            model.zero_grad()
            model(batch).square().mean().backward()

        def sealed(model=model, batch=batch, vault=vault):
            model.zero_grad()
            with fastrack.sealed_activations(vault):
                loss = model(batch).square().mean()
            loss.backward()

        plain()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        sealed()
        if not all(torch.equal(one, other.grad) for one, other in zip(gradients, model.parameters(), strict=True)):
            raise RuntimeError("sealed activations gave other gradients")
        taken = in_turns({"plain": plain, "sealed": sealed}, repeat)
        ratios = [one / other for one, other in zip(taken["sealed"], taken["plain"], strict=True)]
        report(f"step of width {width}, {vault.nbytes / 1e6:.0f} MB saved, time of the plain one", ratios)


class Block(nn.Module):
    """A layer as Llama has it."""

    def __init__(self, width, inner):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.heads = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(3)])
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.gate = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, value):
        normed = self.norms[0](value)
        heads = [head(normed).unflatten(-1, (-1, 64)).transpose(1, 2) for head in self.heads]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        value = value + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](value)
        return value + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def model():
    """A model of 600 MB of which each layer has 49 MB, in float32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8192, 1024), *[Block(1024, 2816) for _ in range(11)], nn.Linear(1024, 8192))


def anonymous():
    """Return the bytes of memory of this process that no file has."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def offload_once(folder, kind, tokens):
    """Print how long the fastest forward pass takes in this process, and what it takes in memory, in layers."""
    import accelerate
    from accelerate.utils import OffloadedWeightsLoader

    with torch.device("meta"):
        net = model()
    layer = sum(parameter.nbytes for parameter in net[1].parameters())
    device = torch.device("cpu")
    plain, sealed = str(folder / "plain.safetensors"), folder / "sealed.safetensors"
    if kind == OFFLOADS[0]:
        accelerate.disk_offload(net, str(folder / "dat"), device)
    elif kind == OFFLOADS[1]:
        index = {name: {"safetensors_file": plain, "weight_name": name} for name in net.state_dict()}
        accelerate.cpu_offload(net, device, state_dict=OffloadedWeightsLoader(index=index))
    elif kind == OFFLOADS[2]:
        fastrack.offload(net, sealed, folder / "owner.key")
    else:
        net = model()
        fastrack.offload(net, fastrack.Vault(folder))
    words = torch.randint(0, 8192, (1, tokens), generator=torch.Generator().manual_seed(0))
    taken, peak, done = [], [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous())

    with torch.inference_mode():
        net[0](words[:, :1])
        start = anonymous()
        for _ in range(6):
            begin = time.perf_counter()
            total = net(words).double().sum().item()
            taken.append(time.perf_counter() - begin)
        thread = threading.Thread(target=watch)
        thread.start()
        net(words)
        done.set()
        thread.join()
    print(json.dumps({"seconds": median(taken[1:]), "layers": (peak[0] - start) / layer, "total": total}))


def measure_offload(repeat, tokens):
    """Compare forward passes whose weights come from a disk, in processes of their own."""
    from accelerate.utils import offload_state_dict
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as name:
        folder, net = Path(name), model()
        fastrack.Key.generate().save(folder / "owner.key")
        fastrack.save_model(net, folder / "sealed.safetensors", folder / "owner.key")
        save_file(net.state_dict(), folder / "plain.safetensors")
        offload_state_dict(str(folder / "dat"), net.state_dict())
        del net
        found = {kind: [] for kind in OFFLOADS}
        for number in range(repeat):
            for kind in OFFLOADS if number % 2 else OFFLOADS[::-1]:
                command = [sys.executable, __file__, "--once", str(folder), kind, "--tokens", str(tokens)]
                answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found[kind].append(json.loads(answer.splitlines()[-1]))
    if len({each["total"] for runs in found.values() for each in runs}) != 1:
        raise RuntimeError("the results differ")
    for kind, runs in found.items():
        seconds, layers = (median(run[each] for run in runs) for each in ("seconds", "layers"))
        print(f"forward of {tokens} tokens, {kind}: {seconds * 1e3:.0f} ms, {layers:.2f} layers in memory")
    for kind in OFFLOADS[2:]:
        for other in OFFLOADS[:2]:
            pairs = zip(found[kind], found[other], strict=True)
            report(f"{kind}, time of {other}", [one["seconds"] / two["seconds"] for one, two in pairs])


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", nargs="+", default=["vault", "orders", "activations", "offload"])
    parser.add_argument("--once", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        offload_once(Path(options.once[0]), options.once[1], options.tokens)
        return
    for name in options.only:
        if name == "offload":
            measure_offload(options.repeat, options.tokens)
        else:
            {"vault": measure_vault, "orders": measure_orders, "activations": measure_activations}[name](options.repeat)


if __name__ == "__main__":
    main()
