"""Models, wrapped loaders and transfers that nothing waits for, of all threads on one device that works later."""

import re

import torch
from helpers.staged import StagedDevice, StagedWork, staged_channel
from helpers.tampering import tamper_file, tampered

import fastrack
import fastrack._training.loader
from fastrack import AuthenticationError
from fastrack._transfer import api as shared
from fastrack.format import HEADER_SIZE, SEALED_CHUNK_SIZE
from soak.worker import KEYS, RING, Violation

DEVICE = "cuda:0"  # the name under which its channel is shared
SIDE = 160


class ForgetfulDevice(StagedDevice):
    """Keeps no list of its operations."""

    def begin(self, messages, note=None):
        return StagedWork(self, messages)


def install():
    """Share one channel to such a device, and start the device's thread."""
    channel = staged_channel(keys=KEYS)
    channel._device.__class__ = ForgetfulDevice
    shared._shared.channels[DEVICE] = channel
    fastrack._training.loader.side_stream = lambda _: None  # it has no streams
    fastrack.to_device(torch.zeros(9), DEVICE)


def model(worker):
    """A model is loaded whole, or refused for the tensor that was altered."""
    path = worker.folder / "m.safetensors"
    saved = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE))
    fastrack.save_model(saved, path, key=worker.key())
    loaded = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE, device="meta") for _ in range(2)))
    if worker.random.random() < 0.5:
        name, chunk = worker.random.choice(["0.weight", "1.weight"]), worker.random.randrange(4)
        tamper_file(path, name, HEADER_SIZE + SEALED_CHUNK_SIZE * chunk)
        load = lambda: fastrack.load_model(loaded, path, keys=KEYS, device=DEVICE)  # noqa: E731
        error = worker.fault("altered model", load, AuthenticationError)
        if (error.tensor, error.chunk) != (name, chunk) or not all(one.is_meta for one in loaded.parameters()):
            raise Violation(f"chunk {chunk} of {name!r} was altered, and {error!r} was raised")
    else:
        fastrack.load_model(loaded, path, keys=KEYS, device=DEVICE)
        for one, other in zip(loaded.parameters(), saved.parameters(), strict=True):
            worker.check(one.detach(), other.detach().numpy(), "a model")
    path.unlink()


def wrapped_loader(worker):
    """Batches arrive as they were, until the one that was altered, which is named."""
    batches = [fastrack.seal(worker.array(20_000), worker.key(), name=_name(worker, n)) for n in range(9)]
    plain = [fastrack.unseal(batch, RING, framework="numpy") for batch in batches]
    altered = worker.random.randrange(2 * len(batches))
    given = [tampered(batch, HEADER_SIZE) if n == altered else batch for n, batch in enumerate(batches)]
    arrived = iter(fastrack.wrap(given, DEVICE, keys=KEYS, prefetch=worker.random.choice([0, 1, 4])))
    for array in plain[:altered]:
        worker.check(next(arrived), array, "a batch")
    if altered < len(batches):
        error = worker.fault("altered batch", lambda: next(arrived), AuthenticationError)
        if error.tensor != batches[altered].name:
            raise Violation(f"{batches[altered].name!r} was altered, and {error!r} was raised")


def without_waiting(worker):
    """Each transfer that fails is raised once, to the thread that started it."""
    started, raised = [], []
    for number in range(worker.random.randrange(1, 12)):
        sealed = fastrack.seal(worker.array(20_000), worker.key(), name=_name(worker, number))
        altered = worker.random.random() < 0.5
        given = tampered(sealed, HEADER_SIZE) if altered else sealed
        try:
            fastrack.to_device(given, DEVICE, keys=KEYS, framework="numpy", non_blocking=True)
        except AuthenticationError as error:
            raised += _names_in(error)
        else:
            started += [sealed.name] * altered
    try:
        fastrack.synchronize(DEVICE)
    except AuthenticationError as error:
        raised += _names_in(error)
    worker.injected["altered, not waited for"] += len(started)
    worker.caught["altered, not waited for"] += len(started)
    if raised != started:
        raise Violation(f"{started} were altered, and {raised} were raised")


def _name(worker, number):
    return f"soak-{worker.number}-{number}"


def _names_in(error):
    return re.findall(r"tensor '(soak-[^']*)'", "\n".join([str(error), *getattr(error, "__notes__", [])]))


JOBS = {model: 2, wrapped_loader: 2, without_waiting: 4}
