import pytest

from fastrack._cli.machine import CpuTee, read_cpu, read_memory, read_software, read_tee

CPUINFO = "processor\t: 0\nmodel name\t: A Fine CPU\nflags\t\t: fpu aes avx2 vaes {}\n\nprocessor\t: 1\n"


@pytest.fixture
def root(tmp_path):
    """Another machine's file system."""

    def make(flags="", **files):
        for path, text in {"proc/cpuinfo": CPUINFO.format(flags), **files}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return make


def test_the_cpu_is_read(root):
    cpu = read_cpu(root())
    assert cpu.model == "A Fine CPU"
    assert [name for name, there in cpu.features.items() if there] == ["aes", "vaes", "avx2"]
    assert cpu.threads >= 1


def test_an_arm_cpu_is_read(root):
    cpuinfo = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd aes sha1 crc32\n"
    assert read_cpu(root(**{"proc/cpuinfo": cpuinfo})).features == {"asimd": True, "aes": True, "pmull": False}


def test_memory_is_read(root):
    files = {
        "proc/meminfo": "MemTotal:       2048 kB\nMemFree:  1 kB\nMemAvailable:    1024 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }
    memory = read_memory(root(**files))
    assert (memory.total, memory.available, memory.huge_pages) == (2 << 20, 1 << 20, "madvise")
    assert memory.page >= 4096


def test_a_system_that_tells_nothing_leaves_cpu_and_memory_unknown(tmp_path):
    cpu = read_cpu(tmp_path)
    assert cpu.features == {}
    assert cpu.model
    memory = read_memory(tmp_path)
    assert (memory.total, memory.available, memory.huge_pages) == (None, None, None)


@pytest.mark.parametrize(
    ("path", "kind"), [("dev/sev-guest", "AMD SEV-SNP"), ("dev/tdx_guest", "Intel TDX"), ("dev/tdx-guest", "Intel TDX")]
)
def test_a_guest_device_is_a_sign(root, path, kind):
    assert read_tee(root(**{path: ""})) == CpuTee(kind, (f"/{path}",))


def test_a_flag_of_a_guest_is_a_sign_and_none_of_a_host(root):
    assert read_tee(root("hypervisor sev_snp")) == CpuTee("AMD SEV-SNP", ("CPU flag sev_snp",))
    assert read_tee(root("hypervisor tdx_guest")).kind == "Intel TDX"
    for flags in ("hypervisor", "sme sev sev_es sev_snp"):
        assert read_tee(root(flags)) == CpuTee(None, ())


def test_versions_are_read(hide):
    software = read_software()
    assert software["numpy"]
    assert software["fastrack"]
    assert list(software)[:2] == ["python", "fastrack"]
    hide("safetensors")
    assert read_software() == software | {"safetensors": None}
