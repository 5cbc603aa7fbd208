"""Kernels are compiled when fastrack is built: alike each time, and again only for other sources."""

import lzma
import sys

import pytest

from fastrack._devices.cuda import cubins, nvrtc


class StandIn:
    """A compiler that answers with the options it got. `compiled` counts its programs."""

    compiled = 0

    def __init__(self, path):
        assert path == "libnvrtc"

    def compile_program(self, name, code, headers, options):
        StandIn.compiled += 1
        assert name == "fastrack.cu"
        assert "aes.cuh" in headers
        assert not [option for option in options if option.startswith("-I")]  # a path might get into the result
        return options[-1].encode(), options[-1].encode() + b"\0", ""


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(cubins, "Nvrtc", StandIn)
    monkeypatch.setattr(StandIn, "compiled", 0)
    return StandIn


def contents(folder):
    return {path.name: lzma.decompress(path.read_bytes()) for path in folder.iterdir()}


@pytest.mark.usefixtures("compiler")
def test_there_is_one_file_for_each_architecture_with_the_digest_of_the_sources_in_its_name(tmp_path):
    sources = nvrtc.find_kernels()
    cubins.make("libnvrtc", sources, tmp_path / "kernels")
    expected = {f"{name}-{sources.digest}.cubin.xz": f"-arch={name}".encode() for name in nvrtc.CUBINS}
    expected[f"{nvrtc.PTX}-{sources.digest}.ptx.xz"] = f"-arch={nvrtc.PTX}".encode()
    assert contents(tmp_path / "kernels") == expected


def test_what_is_there_is_not_compiled_again_and_what_is_of_other_sources_goes(compiler, tmp_path):
    sources = nvrtc.find_kernels()
    cubins.make("libnvrtc", sources, tmp_path)
    first = contents(tmp_path)
    for name in ("sm_90-0123.cubin", "sm_80-0123.cubin.xz", "compute_100-0123.ptx", "sm_90-0123.part"):
        (tmp_path / name).write_bytes(b"of other sources, or killed")
    cubins.make("libnvrtc", sources, tmp_path)
    assert (contents(tmp_path), compiler.compiled) == (first, 5)
    (tmp_path / sources.image("sm_90").name).unlink()
    cubins.make("libnvrtc", sources, tmp_path)
    assert (contents(tmp_path), compiler.compiled) == (first, 6)


def test_without_a_compiler_a_checkout_has_none_and_a_wheel_is_not_built(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cubins, "find_libraries", list)
    monkeypatch.setattr(sys, "argv", ["cubins"])
    cubins.main()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "argv", ["cubins", "--output", str(tmp_path / "kernels")])
    with pytest.raises(SystemExit, match="expected NVRTC, got none"):
        cubins.main()


@pytest.fixture
def library():
    found = cubins.find_libraries()
    if not found:
        pytest.skip("there is no NVRTC")
    return cubins.Nvrtc(found[0])


def test_a_source_that_does_not_compile_is_told_with_the_compilers_words(library):
    with pytest.raises(RuntimeError, match=r"(?s)broken\.cu with -arch=sm_90 failed:.*nothing_of_the_kind"):
        library.compile_program("broken.cu", b"nothing_of_the_kind x;", {}, ("-arch=sm_90",))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_90", nvrtc.PTX])
def test_kernels_are_compiled_to_the_same_bytes_each_time_and_name_no_folder(library, name):
    sources = nvrtc.find_kernels()
    headers = {path.name: path.read_bytes() for path in sources.folder.glob("*.cuh")}
    options = (*cubins.OPTIONS, f"-arch={name}")
    first, second = (library.compile_program(nvrtc.MAIN, sources.code.encode(), headers, options)[:2] for _ in range(2))
    assert first == second
    assert str(sources.folder).encode() not in b"".join(first)
    assert all(kernel.encode() in first[1] for kernel in nvrtc.KERNELS)
