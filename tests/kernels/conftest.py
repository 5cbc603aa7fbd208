import platform

import pytest
from helpers import gpu_suite, kernel_host, kernel_nvrtc, kernel_ptx
from helpers.kernel_host import SOURCE, Host, Library
from helpers.kernel_suite import key, nonce, state  # noqa: F401 - fixtures

device, gpu = gpu_suite.device, gpu_suite.gpu  # fixtures
ON_BOTH = {"test_cu_chunks", "test_cu_gather", "test_cu_vectors"}
# Which run on the shim with `clmad`, too.
CLMAD = "test_a_run_of_chunks_opens_and_seals_under_any_number", "test_every_byte_of_a_tag_counts_and_of_one_every_bit"
# Which run on the interpreted PTX, too.
INTERPRETED = (
    "test_every_message_opens_under_its_own_key",
    "test_each_key_gets_the_state_of_the_standards",
    "test_names_of_chunks_tell_message_and_chunk",
    "test_keys_share_slots_in_turn_and_others_are_left_alone",
    "test_a_block_opens_messages_one_after_another",
    "test_one_launch_has_blocks_of_groups_of_other_sizes",
    "test_pieces_of_one_block_may_differ",
    "test_a_bad_chunk_is_zeros_and_clears_the_bit_of_its_message_only",
    "test_under_the_state_of_another_call_or_message_nothing_is_sealed_or_opened_and_that_is_told",
)
FEW_KEYS = (
    "test_cu_cache",
    "test_cu_gather",
    "test_cu_segments",
    "each_value_meets",
    "of_any_length_is_widened",
    "the_lowest_bad_number",
    "every_byte_of_a_tag",
    "one_after_another",
)


@pytest.fixture(scope="session")
def build_folder(pytestconfig, tmp_path_factory):
    """Return the folder that keeps compiled kernels from one run to the next, if pytest keeps anything."""
    if not pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        return tmp_path_factory.mktemp("kernels")
    return pytestconfig.cache.mkdir("kernels")


@pytest.fixture(scope="session")
def build(build_folder):
    """Compiles a .cu file for the host, or skips where that is not possible."""
    if not kernel_host.is_there():
        pytest.skip("there is no g++ to compile the kernels for the host")
    if platform.machine() != "x86_64":
        pytest.skip("the shim runs kernels on x86-64 only")
    return lambda source, clmad=0: kernel_host.build(source, build_folder, clmad)


@pytest.fixture(scope="session")
def host(request):
    """Return the kernels on the shim, with or without `clmad`, interpreted, or on a GPU."""
    place = getattr(request, "param", "shim")
    if place == "gpu":
        from bench.gpu.launches import ByteRuns

        return ByteRuns(request.getfixturevalue("gpu"))
    if place == "ptx":
        text = kernel_ptx.compile_ptx(kernel_nvrtc.find_libraries()[0])
        return Host(kernel_ptx.PtxLibrary(text), kernel_host.constants(kernel_host.SOURCE))
    build = request.getfixturevalue("build")
    return Host(Library.load(build(SOURCE, clmad=2 if place == "clmad" else 0)), kernel_host.constants(SOURCE))


def pytest_generate_tests(metafunc):
    """Run tests on the shim, interpreted, and on a GPU, where that suits them. `--gpu` leaves all but the GPU out."""
    name, config = metafunc.function.__name__, metafunc.config
    on_both = metafunc.module.__name__ in ON_BOTH
    if "host" in metafunc.fixturenames and (on_both or name in INTERPRETED):
        places = ["shim"] if config.getoption("--gpu") is None else []
        places += ["clmad"] if places and name in CLMAD else []
        if places and name in INTERPRETED and kernel_nvrtc.find_libraries():
            places.append(pytest.param("ptx", marks=(pytest.mark.slow, pytest.mark.nightly)))
        places += ["gpu"] if on_both and gpu_suite.is_available(config) else []
        metafunc.parametrize("host", places, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items):
    """Leave segments, gathers and verdicts under short keys to the night: chunks show what differs, the rounds."""
    for item in items:
        if "aes-128" in item.name and any(name in item.nodeid for name in FEW_KEYS):
            item.add_marker(pytest.mark.nightly)
