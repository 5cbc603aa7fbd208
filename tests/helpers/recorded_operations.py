"""The operations that torch asks of process groups, by their names, those that its C++ begins included."""

import torch
import torch.distributed as dist

OPERATIONS = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "gather", "scatter", "reduce_scatter"),
    *("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "barrier", "send", "recv"),
    *("reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
)
PLAIN = "recorded"  # a backend: gloo, recorded


class PlainGroup(dist.ProcessGroup):
    """A process group that hands every operation to gloo. Torch's trampolines lead here from C++, too."""

    def __init__(self, gloo, rank, size):
        super().__init__(rank, size)
        self.gloo = gloo
        self.name = ""

    def getBackendName(self):  # noqa: N802
        return PLAIN

    def getGroupName(self):  # noqa: N802
        return self.name

    def setGroupName(self, name):  # noqa: N802
        self.name = name

    def setGroupDesc(self, description):  # noqa: N802
        pass


def _forward(name):
    def operation(self, *arguments, **options):
        return getattr(self.gloo, name)(*arguments, **options)

    return operation


for _name in OPERATIONS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(PlainGroup, _name, _forward(_name))


def register_plain():
    def make(given, _):
        rank, size = given.group_rank, given.group_size
        gloo, kind = dist.ProcessGroup(given.store, rank, size), dist.ProcessGroup.BackendType.GLOO
        gloo._set_default_backend(kind)
        backend = dist.ProcessGroupGloo(given.store, rank, size, given.timeout)
        gloo._register_backend(torch.device("cpu"), kind, backend)
        return PlainGroup(gloo, rank, size)

    dist.Backend.register_backend(PLAIN, make, extended_api=True, devices=["cpu"])


def record(kind):
    """Return a list to which every operation of the groups of a class is added from now on."""
    seen = []
    for name in filter(kind.__dict__.__contains__, OPERATIONS):
        setattr(kind, name, torch.compiler.disable(_recording(seen, name, getattr(kind, name))))
    return seen


def _recording(seen, name, operation):
    def recorded(self, *arguments, **options):
        outer = not getattr(self, "is_within", False)  # some operations call others
        self.is_within = True
        if outer:
            seen.append(name)
        try:
            return operation(self, *arguments, **options)
        finally:
            if outer:
                self.is_within = False

    return recorded
