"""A server and its client on one machine: what is answered, what is refused, and what a reload does."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

import fastrack
from examples.serving.client import Client
from examples.serving.model import Config, Transformer, make_model
from examples.serving.sealing import seal_request, trust_nothing
from fastrack.grants import Identity

ROOT = Path(__file__).parents[2]


def run_demo(workers: int) -> int:
    import examples.serving.worker  # noqa: F401 - starlette or uvicorn is missed here, not in a server that is not heard

    torch.set_num_threads(1)  # as in a worker
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        key = fastrack.Key.generate()
        key.save(folder / "owner.key")
        first, second = (Edition.make(folder / f"edition-{seed}", key, Config(), seed) for seed in (1, 2))
        damaged = Edition.make(folder / "edition-3", key, Config(), 3)
        damage(damaged.path / "model.safetensors")
        point(folder / "current", first.path)
        print(f"sealed {first.path.name} and {second.path.name}, and damaged {damaged.path.name}")
        with serving(folder / "current", folder / "owner.key", "--workers", str(workers)) as server:
            client = Client(server.url, trust_nothing)
            print(f"{workers} workers; the offer has key {client.machine.id}, and no evidence")
            is_right = compare(client, {first.id: first})
            for edition, result in ((second, "ok"), (damaged, "refused")):
                point(folder / "current", edition.path)
                server.reload(result)
                print(f"reloaded {edition.path.name}: {result}")
                is_right &= compare(client, {second.id: second})
            refuse(client)
            print(
                "\n" + "\n".join(line for line in server.metrics() if line.startswith(("fastrack_req", "fastrack_rel")))
            )
            client.close()
    return 0 if is_right else 1


@dataclass(slots=True)
class Edition:
    """A sealed folder, with the plain model to compare with."""

    path: Path
    id: str
    model: Transformer = field(repr=False)

    @classmethod
    def make(cls, path: Path, key: fastrack.Key, config: Config, seed: int) -> "Edition":
        with tempfile.TemporaryDirectory(dir=path.parent) as plain:
            model = make_model(Path(plain) / "model", config, seed)
            fastrack.seal_folder(Path(plain) / "model", path, key)
        return cls(path, fastrack.load_folder(path, key).file_id, model)


def point(link: Path, target: Path) -> None:
    """Let a link lead to another folder, at once."""
    fresh = link.with_name(f"{link.name}.new")
    fresh.symlink_to(target.name)
    fresh.replace(link)


def damage(path: Path) -> None:
    """Turn over a bit in the last quarter of a file."""
    content = bytearray(path.read_bytes())
    content[-len(content) // 4] ^= 1
    path.write_bytes(content)


class Server:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.client = Client(url, trust_nothing)

    def ask(self, path: str) -> tuple[int, str]:
        try:
            status, content, _ = self.client.send(path)
        except OSError:  # the worker of this connection has ended
            self.client.close()
            status, content, _ = self.client.send(path)
        return status, content.decode()

    def metrics(self) -> list[str]:
        return self.ask("/metrics")[1].splitlines()

    def metric(self, name: str) -> float:
        """Return a number by its name and labels."""
        return next(float(line.removeprefix(name)) for line in self.metrics() if line.startswith(f"{name} "))

    def reload(self, result: str) -> None:
        """Look at the path again, and wait for the result."""
        name = f'fastrack_reloads_total{{result="{result}"}}'
        before = self.metric(name)
        self.process.send_signal(signal.SIGHUP)
        self.wait(lambda: self.metric(name) > before)

    def wait(self, is_done: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not is_done():
            if self.process.poll() is not None or time.monotonic() > end:
                raise TimeoutError(f"waiting for the server failed: its status is {self.process.poll()}")
            time.sleep(0.01)


@contextmanager
def serving(path: Path, key: Path, *options: str, log: int | None = None, is_ready: bool = True) -> Iterator[Server]:
    """Start a server for development, wait until it is ready, and stop it in the end."""
    command = [sys.executable, "-m", "examples.serving", "serve", str(path), "--key", str(key), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with subprocess.Popen(
        [*command, "--development", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if log is None else log,
        text=True,
        env=environment,
    ) as process:
        try:
            match = re.fullmatch(r"serving on (\S+)\n", process.stdout.readline())
            if match is None:
                raise RuntimeError(f"starting a server failed: expected its address, got status {process.wait()}")
            server = Server(process, match[1])
            if is_ready:
                server.wait(lambda: server.ask("/ready")[0] == 200)
            yield server
            server.client.close()
        finally:
            process.send_signal(signal.SIGTERM)


def compare(client: Client, editions: dict[str, Edition]) -> bool:
    """Ask for answers of all lengths, and compare them with what the plain model says."""
    is_right = True
    for count in (1, 5, 100):
        tokens = torch.randint(256, (count,))
        answer = client.ask(tokens)
        is_right &= torch.equal(answer.logits, editions[answer.edition].model(tokens))
    print(f"  3 answers of edition {answer.edition[:8]}: {'as of the plain model' if is_right else 'WRONG'}")
    return is_right


def refuse(client: Client) -> None:
    """Send what has to be refused."""
    tokens, now = torch.arange(5), int(time.time())
    body = seal_request(tokens, client.machine, now=now)[0]
    altered = bytearray(body)
    altered[100] ^= 1
    client.send("/ask", body)
    requests = {
        "sent again": body,
        "for another machine": seal_request(tokens, Identity.generate().recipient, now=now)[0],
        "altered": bytes(altered),
        "cut": body[:-1],
        "an hour old": seal_request(tokens, client.machine, now=now - 3600)[0],
        "for another edition": seal_request(tokens, client.machine, edition="1" * 32, now=now)[0],
        "tokens out of range": seal_request(tokens - 1, client.machine, now=now)[0],
    }
    print("\nrefused")
    for name, request in requests.items():
        status, reason, _ = client.send("/ask", request)
        if status == 200:
            raise AssertionError(f"refusing failed: expected a refusal of a request {name}, got an answer")
        print(f"  {name:20} {status} {reason.decode()}")
