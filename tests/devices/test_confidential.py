"""Refuse GPUs for keys by the answers of a made-up driver."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from helpers.cases import each
from helpers.fake_nvml import FakeNvml
from helpers.forking import in_forked_child
from helpers.foundry import nvidia

import fastrack
from fastrack import Channel, DeviceError, Key, Vault
from fastrack._devices import confidential, open_device

ONE, OTHER = "41E23D711E1C4FBFAC", "41E23D711E1C4FBFAD"
PLACES = {"0000:1B:00.0": ONE, "0000:9A:00.0": OTHER}


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.delenv(confidential.VARIABLE, raising=False)
    monkeypatch.setattr(confidential, "_process", confidential._Process())


def unknown():
    raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")


@pytest.fixture
def machine(monkeypatch):
    """Return a function that makes the driver of a machine whose CUDA numbers its two GPUs in reverse."""

    def make(**state):
        chains = {place: nvidia.device(serial=serial).pem for place, serial in PLACES.items()}
        nvml = FakeNvml(chains=chains, **state)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        places = [*reversed(PLACES)]
        runtime = SimpleNamespace(deviceGetPCIBusId=lambda number: places[number] if number < 2 else unknown())
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
        return nvml

    return make


NOT_CONFIDENTIAL = [
    ({"feature": 0}, "one with the mode off. Switch it on"),
    ({"feature": 0, "multi_gpu": 2}, "and NVLink encryption, which leaves copies unencrypted"),
    ({"feature": 0, "multi_gpu": 9}, "and unknown \\(9\\), which leaves"),
    ({"environment": 1}, "in the environment simulation"),
    ({"environment": 7}, r"in the environment unknown \(7\)"),
    ({"devtools": 1}, "dev-tools mode, whose memory others can read"),
    ({"ready": 0}, "not known to be ready. Set it ready.*conf-compute -srs 1"),
    ({"fails": {"nvmlSystemGetConfComputeState": 3}}, "one with the mode off"),
    ({"fails": {"nvmlSystemGetConfComputeState": 999}}, "an unknown mode"),
    ({"fails": {"nvmlSystemGetConfComputeGpusReadyState": 999}}, "not known to be ready"),
    ({"fails": {"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}}, "an unknown mode. Install nvidia-ml-py"),
    ({"feature": 0, "multi_gpu": 1, "environment": 1}, "in the environment simulation"),
]


@each(("state", "told"), NOT_CONFIDENTIAL)
def test_a_gpu_that_is_not_confidential_is_refused(machine, state, told):
    machine(**state)
    with pytest.raises(DeviceError, match=f"expected a GPU in confidential mode, as require= requires, got .*{told}"):
        confidential.check("cuda:0", "confidential")
    confidential.check("cuda:0")  # which no one requires anything of


def test_a_confidential_gpu_is_accepted_and_the_driver_asked_once(machine):
    nvml = machine()
    for name in ("cuda:0", "cuda:1", "cuda:0"):
        confidential.check(name, "confidential")
    assert nvml.asked == 1
    confidential.bind_key("3f" * 16, None, None)
    assert nvml.asked == 2


def test_protected_pcie_encrypts_copies_too(machine):
    # As far as it is known: the driver reports it apart, with no environment.
    machine(feature=0, multi_gpu=1, environment=0)
    confidential.check("cuda:0", "confidential")


def test_a_driver_that_cannot_be_asked_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceError, match="an unknown mode"):
        confidential.check("cuda:0", "confidential")


def test_a_requirement_that_is_none_is_refused(machine, monkeypatch):
    machine()
    with pytest.raises(ValueError, match="require=: expected 'confidential' or nothing, got 'Confidential'"):
        Channel("cpu", require="Confidential")
    monkeypatch.setenv(confidential.VARIABLE, "yes")
    with pytest.raises(DeviceError, match="FASTRACK_REQUIRE: expected 'confidential' or nothing, got 'yes'"):
        open_device("cuda:0")


def test_the_environment_requires_it_of_each_gpu_and_leaves_host_memory_alone(machine, monkeypatch):
    machine(devtools=1)
    monkeypatch.setenv(confidential.VARIABLE, "confidential")
    with pytest.raises(DeviceError, match="as FASTRACK_REQUIRE requires, got one in dev-tools mode"):
        fastrack.to_device([], "cuda:3")
    with Channel("cpu") as channel:
        assert channel.device == "cpu"


def test_host_memory_is_no_confidential_gpu():
    with pytest.raises(DeviceError, match="expected a GPU in confidential mode, got 'cpu'"):
        Channel(require="confidential")


def test_a_mode_that_changed_is_found_when_it_is_asked_for_again(machine):
    machine()
    confidential.check("cuda:0", "confidential")
    machine(devtools=1)
    confidential.check("cuda:0", "confidential")
    with pytest.raises(DeviceError, match="dev-tools"):
        confidential.bind_key("3f" * 16, None, None)  # which is renewed
    with pytest.raises(DeviceError, match="dev-tools"):
        confidential.check("cuda:0", "confidential")


class TestKeys:
    def test_a_key_that_is_bound_to_a_chip_opens_on_that_gpu_only_whatever_cuda_calls_it(self, machine):
        machine()
        confidential.bind_key("3f" * 16, "confidential", {ONE})
        confidential.check("cuda:1")
        with pytest.raises(DeviceError, match=f"of the chips {ONE}, as key 3f.* requires, got chip {OTHER}. Use a GPU"):
            confidential.check("cuda:0")

    def test_a_key_is_not_handed_out_where_another_gpu_is_open(self, machine):
        machine()
        confidential.check("cuda:0")
        with pytest.raises(DeviceError, match=f"using cuda:0 failed: expected a GPU of the chips {ONE}"):
            confidential.bind_key("3f" * 16, "confidential", {ONE})
        confidential.check("cuda:0")  # as before
        confidential.bind_key("3f" * 16, "confidential", {ONE, OTHER})

    def test_a_gpu_that_could_not_be_opened_keeps_no_key_away(self, machine):
        machine(feature=0)
        for name in ("cuda:7", "cuda:0"):  # of which CUDA knows the second: the first cannot be opened
            confidential.check(name)
        with pytest.raises(DeviceError, match="using cuda:0 failed"):
            confidential.bind_key("3f" * 16, "confidential", None)
        del confidential._process.opened["cuda:0"]
        confidential.bind_key("3f" * 16, "confidential", None)
        with pytest.raises(DeviceError, match="using cuda:7 failed"):
            confidential.check("cuda:7")

    def test_two_keys_both_count(self, machine):
        machine()
        confidential.bind_key("3f" * 16, "confidential", {ONE})
        confidential.bind_key("40" * 16, "confidential", {OTHER})
        for name in ("cuda:0", "cuda:1"):
            with pytest.raises(DeviceError, match="of the chips"):
                confidential.check(name)

    @each("missing", ["nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetConfComputeGpuCertificate"])
    def test_a_gpu_whose_certificate_is_unknown_is_another(self, machine, missing):
        machine(fails={missing: 999})
        confidential.bind_key("3f" * 16, "confidential", {ONE})
        with pytest.raises(DeviceError, match="one whose certificate cannot be read"):
            confidential.check("cuda:1")

    def test_certificates_that_are_none_are_another_gpus(self, machine, monkeypatch):
        nvml = machine()
        for chain in (b"", b"x" * 40, nvidia.device().pem[:900]):
            answer = SimpleNamespace(attestationCertChain=list(chain), attestationCertChainSize=len(chain))
            nvml.nvmlDeviceGetConfComputeGpuCertificate = lambda _, answer=answer: answer
            confidential.bind_key("3f" * 16, "confidential", {ONE})
            with pytest.raises(DeviceError, match="one whose certificate cannot be read"):
                confidential.check("cuda:1")


def test_a_forked_child_has_what_is_required_and_none_of_the_gpus():
    confidential.bind_key("3f" * 16, "confidential", {ONE})
    found = confidential._process
    found.opened["cuda:0"], found.chips["cuda:0"] = "", ONE  # which may be another GPU in the child
    after = in_forked_child(lambda: (list(found.keys), list(found.opened), list(found.chips)))
    assert after == (["3f" * 16], [], [])


def test_no_caller_derives_a_key_before_the_gpu_was_asked(machine, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    machine(devtools=1)
    key, path, on = Key.generate(), tmp_path / "model.safetensors", "confidential"
    fastrack.save_model(torch.nn.Linear(2, 2), path, key=key)
    module = torch.nn.Linear(2, 2, device="meta")
    vault = Vault(require=on)
    ticket = vault.put.__func__(Vault(), "block", torch.zeros(2))
    monkeypatch.setattr(Key, "material", lambda _: pytest.fail("a key was derived"))
    calls = [
        lambda: Channel("cuda", keys=key, require=on),
        lambda: fastrack.wrap([{}], "cuda:1", keys=key, require=on),
        lambda: fastrack.load_model(module, path, key, device="cuda", require=on),
        lambda: vault.get(ticket, device="cuda"),
    ]
    monkeypatch.setattr(vault, "_find", lambda _: (None, None))
    for call in calls:
        with pytest.raises(DeviceError, match="as require= requires, got one in dev-tools mode"):
            call()
    for call in (lambda: vault.put("block", torch.zeros(2)), lambda: fastrack.wrap([{}], require=on)):
        with pytest.raises(DeviceError, match="got 'cpu'"):
            call()


def test_only_one_function_opens_a_gpu():
    opening = {path.name for path in Path(fastrack.__path__[0]).rglob("*.py") if "CudaDevice(" in path.read_text()}
    assert opening == {"__init__.py", "paths.py", "steps.py", "endpoints.py"}  # the others are of `_bench`
