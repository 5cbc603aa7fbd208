import dataclasses
import json
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError

import pytest
from helpers.cases import each
from helpers.engines import Wrong
from helpers.fake_nvml import FakeNvml

from fastrack import Key
from fastrack._cli import console, machine, proofs
from fastrack._cli.commands import doctor, selftest
from fastrack._crypto import engine as aead
from fastrack._devices.cuda.driver import CopySpeeds, Speeds
from fastrack._devices.graphics import Gpu, Graphics
from fastrack._devices.nvml import Confidential
from fastrack.kv import _hosts


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """Have each value on a line."""
    monkeypatch.setenv("COLUMNS", "500")


@pytest.fixture(scope="module")
def facts():
    """Of a machine with neither a CPU TEE nor a GPU."""
    return dataclasses.replace(
        doctor.gather(), tee=machine.CpuTee(None, ()), graphics=Graphics(absent="no NVIDIA driver"), cuda=None
    )


def unprotected(facts, **others):
    statements = doctor.state(dataclasses.replace(facts, **others))
    return " ".join(statement.text for statement in statements if not statement.protected)


def with_gpu(**mode):
    return Graphics(driver="580", gpus=(Gpu("H100", 80 << 30),), confidential=Confidential(**mode))


# The command


def test_a_machine_is_examined(cli):
    said = cli("doctor").stdout
    for title in (
        "Software",
        "Machine",
        "Engine",
        "Native extension",
        "GPU",
        "Attestation",
        "Key file",
        "Left over",
        "What is protected here",
        "What is not",
    ):
        assert f"{title}\n" in said
    assert "ok against OpenSSL" in said
    assert f"AES-GCM       {aead.selected_engine().name}" in said


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_breaks_no_word(cli, monkeypatch, columns):
    whole = cli("doctor").stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = cli("doctor").stdout
    without_figures = [re.sub(r"[\d.]+", "0", said).split() for said in (whole, narrow)]
    assert without_figures[0] == without_figures[1]
    longer = [line for line in narrow.splitlines() if len(line) > columns]
    assert [line for line in longer if len(line.split()) > 1 and line[:3] != "  f"] == []  # a path has its own line


@pytest.mark.slow
def test_a_quota_of_the_control_group_is_told(facts, capsys):
    for quota, told in ((0.5, "usable, by a quota of 0.5 of the control group"), (None, "usable\n")):
        doctor.show_facts(dataclasses.replace(facts, cpu_quota=quota), [], console.stdout())
        assert told in capsys.readouterr().out


PART = ".fastrack-0123456789abcdef.part"


def test_what_killed_commands_left_is_told_with_how_to_remove_it(cli, folder, monkeypatch):
    (folder / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "temporary"))
    assert cli("doctor --quiet").stdout == ""
    assert "unfinished    nothing seen" in cli("doctor").stdout
    left = [folder / PART, folder / "temporary" / PART, folder / "my data; x" / PART]
    for path in left:
        path.mkdir(parents=True)
    for near in (".fastrack-0123.part", f"a{PART}", f"{PART}s"):
        (folder / near).touch()
    for line in ("doctor 'my data; x'", "doctor --quiet 'my data; x' ."):
        said = cli(line).stdout
        assert said.count("unfinished") == 3
        assert "What `unseal` left is plaintext. See that no fastrack runs there" in said
        assert all(f" {shlex.quote(str(path))}\n" in said for path in left)
    assert cli.json("doctor 'my data; x'")["left_over"] == [str(path) for path in left]
    assert "Software" not in cli("doctor --quiet").stdout


def test_what_is_looked_through_is_a_folder(cli):
    assert "expected a folder, got 'nowhere'" in cli("doctor nowhere", status=2).stderr


def test_a_machine_is_described_to_a_program(cli):
    document = cli.json("doctor")
    assert set(document) == {
        "software",
        "cpu",
        "cpu_quota",
        "memory",
        "code",
        "engine",
        "tee",
        "graphics",
        "cuda",
        "key_file",
        "left_over",
        "proofs",
        "statements",
    }
    assert document["proofs"][0]["part"] == "CPU"
    assert (document["engine"]["engine"], document["engine"]["problem"]) == (aead.selected_engine().name, None)
    assert {statement["protected"] for statement in document["statements"]} == {True, False}


@each(
    ("nvml", "told"),
    [
        (FakeNvml(), ["GPU 0         NVIDIA H100, 80 GiB", "confidential  on", "GPU 0         can give an attest"]),
        (FakeNvml(feature=0), ["confidential  off", "GPU memory is not protected", "no evidence: confidential mode"]),
        (FakeNvml(devtools=1), ["dev tools     on", "Dev-tools mode is on"]),
        (FakeNvml(ready=0), ["ready         no: the GPU refuses all work", "nvidia-smi conf-compute -srs 1"]),
        (FakeNvml(persistence=0), ["persistence   off: ", "nvidia-smi -pm 1"]),
        (
            FakeNvml(feature=0, multi_gpu=2),
            ["NVLink encryption does not protect copies", "not protected from its host"],
        ),
        (FakeNvml(feature=0, multi_gpu=9), ["unknown (9) does not protect copies"]),
        (FakeNvml(fails={"nvmlInit": 12}), ["driver        no NVIDIA driver"]),
        (FakeNvml(fails={"nvmlDeviceGetName": 15}), ["no answer     name of GPU 0: GPU is lost"]),
    ],
    ids=["on", "off", "devtools", "not ready", "no persistence", "NVLink", "unknown", "no driver", "a failure"],
)
def test_what_the_driver_says_is_shown(cli, monkeypatch, nvml, told):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    said = cli("doctor").stdout
    assert [text for text in told if text not in said] == []
    cli.json("doctor")


def test_an_engine_that_fails_its_test_is_told_with_a_status(cli, monkeypatch):
    check = dataclasses.replace(selftest.check_engine(), problem="it opens a chunk that was altered")
    monkeypatch.setattr(doctor, "check_engine", lambda: check)
    assert "FAILED: it opens a chunk that was altered" in cli("doctor", status=1).stdout
    assert cli.json("doctor", status=1)["engine"]["problem"] == "it opens a chunk that was altered"


@pytest.fixture
def choose_anew():
    """Return a function that has the engine be chosen again, as it is at the end."""
    clear = aead.selected_engine.cache_clear
    yield clear
    clear()


def test_an_engine_is_told_with_what_chose_it(cli, monkeypatch, choose_anew):
    monkeypatch.delenv("FASTRACK_ENGINE", raising=False)
    choose_anew()
    assert "chosen by     fastrack; FASTRACK_ENGINE is not set" in cli("doctor").stdout
    monkeypatch.setenv("FASTRACK_ENGINE", "openssl")
    choose_anew()
    said = cli("doctor").stdout
    assert "AES-GCM       openssl" in said
    assert "chosen by     the environment, with FASTRACK_ENGINE" in said
    assert "passed over" not in said
    engine = cli.json("doctor")["engine"]
    assert (engine["forced"], engine["fault"]) == (True, None)
    monkeypatch.setattr(
        aead, "selected_engine", lambda: aead.SelectedEngine("openssl", fault="vaes-512 failed its test")
    )
    assert "passed over   vaes-512 failed its test" in cli("doctor").stdout
    engine = cli.json("doctor")["engine"]
    assert (engine["forced"], engine["fault"]) == (False, "vaes-512 failed its test")


def test_a_variable_that_names_no_engine_is_told_with_a_status(cli, monkeypatch, choose_anew):
    monkeypatch.setenv("FASTRACK_ENGINE", "quantum")
    choose_anew()
    said = cli("doctor", status=1).stdout
    assert f"AES-GCM       none (available: {', '.join(aead.available_engines())})" in said
    assert "got 'quantum'. Name one of these, or unset FASTRACK_ENGINE" in said
    assert cli.json("doctor", status=1)["engine"]["engine"] is None


def test_a_gpu_that_cannot_be_used_is_told_with_what_to_install(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    said = cli("doctor").stdout
    assert "self-test     not usable: " in said
    assert "fastrack-io[cu13]" in said


def test_who_compiled_the_kernels_is_told(cli, monkeypatch, gpu_test):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    check = selftest.CudaCheck(True, None, "fastrack's build, for sm_90")
    gpu_test(check)
    assert "kernels       compiled by fastrack's build, for sm_90" in cli("doctor").stdout
    assert cli.json("doctor")["cuda"]["kernels"] == check.kernels


def test_the_test_of_a_gpu_knows_a_device_that_works(monkeypatch):
    monkeypatch.setattr("fastrack._transfer.channel.canonical", lambda device: "cpu")
    assert selftest.check_cuda() == selftest.CudaCheck(True, None)
    monkeypatch.setattr("fastrack._devices.cpu.CpuDevice.copy_speeds", COPIES, raising=False)
    assert selftest.check_cuda() == selftest.CudaCheck(True, None, copies=COPIES)


@each(
    ("is_near", "told"),
    [
        (True, "GPU 0         H100, 80 GiB, at NUMA node 1\n"),
        (False, "at NUMA node 1; all CPUs of this process are of others. Start it with `numactl --cpunodebind=1 --mem"),
    ],
)
def test_a_gpu_is_told_with_its_numa_node_and_with_what_to_do_if_no_cpu_is_there(
    cli, monkeypatch, gpu_test, is_near, told
):
    graphics = Graphics(driver="580", gpus=(Gpu("H100", 80 << 30, numa_node=1, is_near=is_near),))
    monkeypatch.setattr(doctor, "read_graphics", lambda: graphics)
    gpu_test(selftest.CudaCheck(True, None))
    assert told in cli("doctor").stdout


COPIES = CopySpeeds(Speeds((1.11, 3.14), (2.0, 4.0)), Speeds((1.21, 3.24), (2.1, 4.1)))


def test_copies_are_told_where_they_were_compared_and_connections_where_they_are_few(cli, monkeypatch, gpu_test):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    gpu_test(selftest.CudaCheck(True, None, copies=COPIES))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    said = cli("doctor").stdout
    assert "copies up     64 KiB: page-locked memory 1.1, pageable 2.0 GB/s; 4 MiB: 3.1, 4.0 GB/s" in said
    assert "copies down   64 KiB: page-locked memory 1.2, pageable 2.1 GB/s; 4 MiB: 3.2, 4.1 GB/s" in said
    assert "connections" not in said
    copies = cli.json("doctor")["cuda"]["copies"]
    assert copies["uploads"] == {"page_locked": [1.11, 3.14], "pageable": [2.0, 4.0]}
    assert copies["downloads"] == {"page_locked": [1.21, 3.24], "pageable": [2.1, 4.1]}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "connections   CUDA_DEVICE_MAX_CONNECTIONS=1 leaves transfers 1 of 4 lanes: " in cli("doctor").stdout


# Evidence

TDX, SNP = machine.CpuTee("Intel TDX", ("/dev/tdx_guest",)), machine.CpuTee("AMD SEV-SNP", ("/dev/sev-guest",))
TSM = "sys/kernel/config/tsm/report"


@pytest.fixture
def tree(tmp_path):
    """Return a function that makes the file system of another machine, with configfs-tsm of a provider."""

    def make(provider=None):
        if provider is not None:
            (tmp_path / TSM / "doctor").mkdir(parents=True)
            (tmp_path / TSM / "doctor" / "provider").write_text(f"{provider}\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("tee", "provider", "kind", "told"),
    [
        (TDX, "tdx_guest", "tdx", "can give a TDX quote"),
        (SNP, "sev_guest", "snp", "can give a SEV-SNP report"),
        (machine.CpuTee(None, ()), "tdx_guest", "tdx", "can give a TDX quote"),
        (TDX, None, "tdx", f"no folder /{TSM}. Use Linux 6.7 or later, mount configfs, and load tdx_guest"),
        (SNP, None, "snp", "load sev_guest"),
        (machine.CpuTee(None, ()), None, None, "Run it in a confidential virtual machine"),
        (machine.CpuTee("Arm CCA", ()), "arm_cca_guest", None, "the providers tdx_guest, sev_guest, got arm_cca"),
    ],
)
def test_the_evidence_of_a_cpu_follows_from_its_kernel(tree, tee, provider, kind, told):
    [proof] = proofs.read_proofs(tee, Graphics(absent="no NVIDIA driver"), tree(provider))
    assert (proof.part, proof.kind, proof.possible) == ("CPU", kind, told.startswith("can"))
    assert told in str(proof)
    assert (proof.missing is None) == proof.possible


def test_evidence_that_only_root_can_ask_for_is_told(tree, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    [proof] = proofs.read_proofs(TDX, Graphics(), tree("tdx_guest"))
    assert (proof.kind, proof.possible) == ("tdx", False)
    assert "Run `fastrack attest collect` as root" in proof.missing


@pytest.mark.parametrize(
    ("mode", "attests", "told"),
    [
        ({"enabled": True, "environment": "production", "devtools": False}, True, "can give an attestation report"),
        ({"enabled": False, "multi_gpu": "protected PCIe"}, True, "can give an attestation report"),
        ({"enabled": False}, True, "confidential mode is off. Switch it on from the host"),
        ({"enabled": True, "environment": "production", "devtools": True}, True, "dev-tools mode is on"),
        ({"enabled": True, "environment": "simulation", "devtools": False}, True, "its environment is simulation"),
        ({"enabled": True, "environment": "production", "devtools": False}, False, "it gave no certificates"),
        ({}, None, "Install driver 550 or later"),
    ],
)
def test_the_evidence_of_each_gpu_follows_from_its_mode(tree, mode, attests, told):
    gpus = (Gpu("H100", 80 << 30, attests), Gpu("H100", 80 << 30, False))
    graphics = Graphics(driver="580", gpus=gpus, confidential=Confidential(**mode))
    _, first, second = proofs.read_proofs(TDX, graphics, tree())
    assert (first.part, first.possible) == ("GPU 0", told.startswith("can"))
    assert told in str(first)
    assert (second.part, second.possible) == ("GPU 1", False)


# Statements


def test_a_machine_without_a_tee_is_open_to_its_operator_and_some_things_to_anyone(facts):
    assert "the operator of this machine can read that memory" in unprotected(facts)
    assert "No GPU was seen: everything is opened on the host." in unprotected(facts)
    assert "Names, dtypes, shapes and sizes are visible" in unprotected(facts)
    assert "An older version of a whole file is accepted" in unprotected(facts)


def test_signs_of_a_tee_are_not_taken_for_attestation(facts):
    said = unprotected(facts, tee=machine.CpuTee("Intel TDX", ("/dev/tdx_guest",)))
    assert "Signs of Intel TDX (/dev/tdx_guest)" in said
    assert "seen, not attested" in said
    assert "the operator of this machine can read" not in said


@each(
    ("graphics", "told"),
    [
        (with_gpu(enabled=False), "GPU memory is not protected from its host"),
        (with_gpu(enabled=True, environment="production", devtools=True), "nothing on the GPU is protected"),
        (with_gpu(enabled=True, environment="simulation", devtools=False), "which protects nothing"),
        (with_gpu(enabled=True, environment="production", devtools=False), "This was not attested"),
        (with_gpu(enabled=False, multi_gpu="protected PCIe", devtools=False), "reports protected PCIe"),
        (with_gpu(), "did not report"),
    ],
)
def test_what_a_gpu_protects_follows_from_its_mode(facts, graphics, told):
    assert told in unprotected(facts, graphics=graphics, cuda=selftest.CudaCheck(True, None))


def test_where_an_opened_tensor_lies_follows_from_the_gpus_test(facts):
    graphics = with_gpu(enabled=True)
    assert "lies in the memory of the GPU" in unprotected(facts, graphics=graphics, cuda=selftest.CudaCheck(True, None))
    said = unprotected(facts, graphics=graphics, cuda=selftest.CudaCheck(False, "CuPy is absent"))
    assert "Device cuda: CuPy is absent. Everything is opened on the host" in said
    assert "whatever the GPU protects" in said


def test_no_gpu_ever_counts_as_protection(facts):
    graphics = with_gpu(enabled=True, environment="production")
    statements = doctor.state(dataclasses.replace(facts, graphics=graphics, cuda=selftest.CudaCheck(True, None)))
    assert not [statement for statement in statements if statement.protected and "GPU" in statement.text]


# The key file


@pytest.mark.usefixtures("key")
def test_a_key_file_is_named_by_its_key_or_its_problem(cli, folder, monkeypatch):
    assert doctor.read_key_file() == doctor.KeyFile()
    assert "FASTRACK_KEY_FILE is not set" in cli("doctor").stdout
    monkeypatch.setenv("FASTRACK_KEY_FILE", "owner.key")
    assert doctor.read_key_file() == doctor.KeyFile("owner.key", Key.load("owner.key").id)
    assert Key.load("owner.key").id in cli("doctor").stdout
    (folder / "owner.key").chmod(0o644)
    assert "mode 0644" in doctor.read_key_file().problem
    assert "cannot be used: owner.key may be used by others" in cli("doctor").stdout
    monkeypatch.setenv("FASTRACK_KEY_FILE", "/nowhere/owner.key")
    assert doctor.read_key_file().problem == "/nowhere/owner.key: No such file or directory"


# The self-test


@each("name", aead.available_engines())
def test_a_sound_engine_passes(name):
    check = selftest.check_engine(aead.get_engine(name, threads=1))
    assert check.problem is None
    assert check.open_gbps > 0
    assert check.seal_gbps > 0


def seal_backwards(engine, schedule, source, target, first):
    engine.seal_run(schedule, source[::-1].copy(), target, first)


def seal_with_a_wrong_tag(engine, schedule, source, target, first):
    engine.seal_run(schedule, source, target, first)
    target[-1] ^= 1


@each(
    ("method", "wrong", "problem"),
    [
        ("open_run", lambda engine, *args: engine.open_run(*args) and None, "it opens a chunk that was altered"),
        ("open_run", lambda *_: 0, "it does not open what it sealed"),
        ("seal_run", seal_backwards, "OpenSSL opens what it sealed to something else"),
        ("seal_run", seal_with_a_wrong_tag, "OpenSSL refuses what it sealed"),
    ],
)
def test_an_engine_that_goes_wrong_fails(method, wrong, problem):
    assert selftest.check_engine(Wrong(**{method: wrong})).problem == problem


# Servers with KV caches


def with_hosts(monkeypatch, **versions):
    def version(package):
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(_hosts, "version", version)


def test_servers_that_are_installed_are_told_with_what_holds(cli, monkeypatch):
    with_hosts(monkeypatch, vllm="0.33.0", lmcache="0.5.6")
    before = {"vllm", "lmcache", "sglang"} & sys.modules.keys()  # of other tests of this process
    said = " ".join(cli("doctor --hosts").stdout.split())
    for words in (
        "vLLM version 0.33.0; 0.32 or later is needed on the GPU sealed KV blocks: yes",
        "LMCache version 0.5.6; 0.5.6 or later is needed on the GPU sealed KV blocks: no: it gives",
        "SGLang version not installed; 0.5.20 or later has doors",
    ):
        assert words in said
    assert {"vllm", "lmcache", "sglang"} & sys.modules.keys() == before
    assert cli("doctor --hosts --quiet").stdout == ""


def test_a_server_that_its_doors_refuse_needs_attention(cli, monkeypatch):
    with_hosts(monkeypatch, sglang="0.5.19", lmcache="0.5.6")
    done = cli("doctor --hosts --quiet", status=1)
    assert "SGLang" in done.stdout
    assert "0.5.19, which its doors refuse: older ones hash pages without the tenant's salt" in done.stdout
    assert "LMCache" not in done.stdout
    hosts = json.loads(cli("doctor --hosts --json", status=1).stdout)["hosts"]
    told = {each["name"]: (each["version"], each["refused"], each["least"]) for each in hosts}
    assert told == {
        "vLLM": (None, False, "0.32"),
        "LMCache": ("0.5.6", False, "0.5.6"),
        "SGLang": ("0.5.19", True, "0.5.20"),
    }
    assert {"on_gpu", "tiers", "confidential", "reason"} <= hosts[0].keys()


@pytest.mark.parametrize(
    ("version", "is_old"),
    [
        ("0.32.0", False),
        ("0.32", False),
        ("0.32.0rc1", True),
        ("0.32.1.dev3+g12ab", False),
        ("0.33.0+cpu", False),
        ("1.0", False),
        ("0.31.9", True),
        ("0.9", True),
        ("dev", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version, is_old):
    assert _hosts.is_old("vLLM", version) == is_old


def test_the_folders_of_doctor_do_not_go_with_hosts(cli, tmp_path):
    assert "--hosts" in cli(f"doctor --hosts {tmp_path}", status=2).stderr
