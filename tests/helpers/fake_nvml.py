"""A pynvml for tests, which answers for one GPU, or for one with each chain of certificates."""

from functools import partial
from types import SimpleNamespace

import pynvml

GIB = 1 << 30


class FakeNvml:
    """A driver with one GPU. `fails` gives the error code of the calls that are to fail.

    `chains` are the certificates of GPUs by their PCI addresses, in the order in which NVML numbers them.
    """

    def __init__(
        self, *, feature=1, environment=2, devtools=0, ready=1, multi_gpu=0, persistence=1, chains=None, fails=None
    ):
        self.multi_gpu = multi_gpu
        self.open = 0
        state = SimpleNamespace(ccFeature=feature, environment=environment, devToolsMode=devtools)
        answers = {
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
            "nvmlDeviceGetName": {"handle 0": "NVIDIA H100"}.__getitem__,
            "nvmlDeviceGetPciInfo": {"handle 0": SimpleNamespace(domain=0, bus=0x1B, device=2)}.__getitem__,
            "nvmlDeviceGetMemoryInfo": {"handle 0": SimpleNamespace(total=80 * GIB)}.__getitem__,
            "nvmlDeviceGetConfComputeGpuCertificate": {"handle 0": SimpleNamespace()}.__getitem__,
            "nvmlDeviceGetPersistenceMode": {"handle 0": persistence}.__getitem__,
            "nvmlSystemGetConfComputeState": lambda: state,
            "nvmlSystemGetConfComputeGpusReadyState": lambda: ready,
        }
        if chains is not None:
            answers |= {
                "nvmlDeviceGetCount": lambda: len(chains),
                "nvmlDeviceGetHandleByPciBusId": lambda place: [*chains].index(place.upper()),
                "nvmlDeviceGetConfComputeGpuCertificate": lambda handle: _certificate([*chains.values()][handle]),
            }
        self.asked = 0
        self.__dict__.update(answers | {name: partial(self.fail, code) for name, code in (fails or {}).items()})

    def __getattr__(self, name):
        if name.startswith("nvml") and not name.startswith("nvmlError"):
            raise AttributeError(name)
        return getattr(pynvml, name)

    @staticmethod
    def fail(code, *_):
        raise pynvml.NVMLError(code)

    def nvmlInit(self):  # noqa: N802
        self.open += 1
        self.asked += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlSystemGetConfComputeSettings(self, settings):  # noqa: N802
        settings._obj.multiGpuMode = self.multi_gpu
        return pynvml.NVML_SUCCESS


def _certificate(pem):
    chain = pem + b"\0"  # NVML counts the end of the string
    return SimpleNamespace(attestationCertChain=list(chain), attestationCertChainSize=len(chain))
