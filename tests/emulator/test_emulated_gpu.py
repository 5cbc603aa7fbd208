"""Test fastrack with the real CuPy on the emulator: results, order, calls and faults."""

import json
import lzma
import shutil
from itertools import pairwise

import pytest

from emulator.conftest import start
from fastrack._devices.cuda import cubins, nvrtc

MIB = 1 << 20
GIB = str(1 << 30)
SLOW_ON_THE_HOST = "test_gives_back_the_memory_it_took"  # stands here as well, without kernels


TRANSFERS = ["tests/gpu"]
KERNELS = [f"tests/kernels/test_cu_{name}.py" for name in ("chunks", "gather", "vectors")]


def run_gpu_tests(files, device, chosen, **environment):
    """Run the tests for a GPU whose names match."""
    options = ["-p", "no:cacheprovider", "-p", "emulator.small", "-q", "--gpu", device]
    chosen = f"({chosen}) and not torch and not {SLOW_ON_THE_HOST}"
    done = start("pytest", *files, *options, "-k", chosen, **environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture(scope="module")
def calls(run_case):
    return run_case("calls", EMU_KERNELS="noop")


@pytest.fixture(scope="module")
def times(run_case):
    """Measure up to three times, since other processes of the machine disturb, and take the best."""
    best = {"times": {"large": 1e9}, "beside": {"small": 1e9}}
    for _ in range(3):
        found = run_case("busy_thread", EMU_KERNELS="noop", EMU_CALL_TIME="3")
        for kind, values in best.items():
            values.update({name: min(value, found[kind][name]) for name, value in values.items()})
        if best["times"]["large"] <= 3 and best["beside"]["small"] <= 5:
            break
    return best


class TestResults:
    @pytest.mark.nightly  # by day those of one device, among what holds on a GPU
    def test_known_answers_are_right_on_both_devices(self, run_case):
        first, second = run_case("known_answers")
        assert first == second > 70

    @pytest.mark.slow
    @pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.nightly)])
    @pytest.mark.parametrize(
        "files",
        # The kernels are interpreted in `ptx` and compiled for the host in `kernels`, too.
        [pytest.param(TRANSFERS, id="transfers"), pytest.param(KERNELS, id="kernels", marks=pytest.mark.nightly)],
    )
    def test_what_holds_on_a_gpu_holds_here(self, device, files):
        run_gpu_tests(files, device, "test", EMU_DELAY="50")

    def test_values_are_widened_and_nothing_is_left_of_bad_ones_or_bad_scales(self, run_case):
        found = run_case("widening", EMU_DELAY="50")
        assert found["right"] == [True, True, True]
        assert ["'w1', chunk 1" in found["refused"][0], "'w1_scale', chunk 0" in found["refused"][1]] == [True, True]
        assert found["left"] == [0, 0]

    def test_transfers_arrive_in_confidential_mode(self):
        chosen = "(TestToDevice and small) or TestNonBlocking"
        run_gpu_tests(TRANSFERS, "cuda:0", chosen, EMU_CONFIDENTIAL="1")

    def test_a_key_is_derived_for_a_confidential_gpu_alone(self, run_case):
        found = run_case("required", EMU_CONFIDENTIAL="1")
        on = found.pop("on")
        assert (on["told"], on["derived"] > 0, on["launched"] > 0, found.pop("its own GPU")) == (True,) * 4
        told = {name: done.pop("told") for name, done in found.items()}
        assert all(done == {"derived": 0, "launched": 0} for done in found.values())
        reasons = {
            "dev-tools": "dev-tools mode",
            "off": "the mode off",
            "NVLink only": "the mode off, and NVLink encryption, which leaves copies unencrypted",
            "unknown": "an unknown mode",
            "not ready": "not known to be ready",
            "another GPU": "got chip 41E23D711E1C4FBFAD",
        }
        assert {name for name, reason in reasons.items() if reason in told[name]} == told.keys() == reasons.keys()

    def test_confidential_mode_is_seen(self, run_case):
        both = {"good": True, "threaded": True, "compared": True}
        assert run_case("confidential", EMU_CONFIDENTIAL="1") == {"enabled": True, "multi_gpu": "none", **both}
        protected = {"enabled": False, "multi_gpu": "protected PCIe", **both}
        assert run_case("confidential", EMU_CONFIDENTIAL="2") == protected
        off = {"enabled": False, "multi_gpu": "none", "good": True, "threaded": False, "compared": False}
        assert run_case("confidential") == off

    def test_transfers_arrive_through_pageable_memory_in_confidential_mode(self, run_case):
        found = run_case("pageable_staging", EMU_CONFIDENTIAL="1", EMU_DELAY="200")
        assert found["good"]
        assert min(found["pageable"]) > 0
        assert run_case("pageable_staging")["pageable"] == [0, 0]  # elsewhere nothing is compared

    def test_a_process_without_enough_page_locked_memory_goes_on_with_pageable(self, run_case):
        for mode in ("0", "1"):
            found = run_case("short_of_page_locked_memory", EMU_PAGE_LOCKED=str(MIB), EMU_CONFIDENTIAL=mode)
            assert (found["good"], found["pageable"]) == (True, [True, True])
            (said,) = found["said"]  # once
            assert said.startswith(
                "allocating page-locked memory for cuda:0 failed: expected some of the host's, got none"
            )
        assert run_case("short_of_page_locked_memory", EMU_PAGE_LOCKED="0")["good"] is True

    def test_a_gpu_that_is_not_ready_is_an_error_with_what_to_do(self, run_case):
        found = run_case("not_ready", EMU_CONFIDENTIAL="1", EMU_READY="0")
        assert "cudaErrorSystemNotReady" in found["error"]
        assert found["self-test"] == f"not usable: {found['error']}"
        assert "nvidia-smi conf-compute -srs 1" in found["error"]
        assert found["told"].startswith("no: ")

    # A handle that means another stream in each thread must be used by the caller's thread.
    @pytest.mark.nightly
    def test_transfers_arrive_on_per_thread_default_streams(self):
        chosen = "TestNonBlocking or (TestOut and fill) or TestToHost"
        run_gpu_tests(TRANSFERS, "cuda:0", chosen, CUPY_CUDA_PER_THREAD_DEFAULT_STREAM="1", EMU_DELAY="200")


class TestPagedMemory:
    @pytest.mark.parametrize("mode", ["0", "1"])
    @pytest.mark.parametrize(
        ("first", "step"), [(5, 7), *(pytest.param(place, 4, marks=pytest.mark.nightly) for place in range(4))]
    )
    def test_blocks_of_all_layouts_and_ranks_are_stored_and_loaded_and_bad_ones_missed(self, mode, first, step):
        done = start("emulator.kv_cases", str(first), str(step), EMU_CONFIDENTIAL=mode)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert (found["wrong"], found["violations"]) == ({}, 0)
        assert found["cases"] >= 60


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Compile the kernels as fastrack's build does, and lay them beside their sources as a wheel does."""
    sources = nvrtc.find_kernels()
    folder = tmp_path_factory.mktemp("package") / "kernels"
    shutil.copytree(sources.folder, folder)
    for name in nvrtc.CUBINS:  # those of `make native`; its NVRTC may write PTX that the emulated driver is too old for
        if (made := sources.image(name)).exists():
            shutil.copy(made, folder)
    cubins.make(cubins.find_libraries()[0], sources, folder)
    return folder.parent


class TestKernels:
    @pytest.fixture
    def run(self, run_case, package):
        return lambda package=package, **machine: run_case("kernels", CASE_PACKAGE=str(package), **machine)

    def test_what_was_compiled_for_the_device_is_loaded_and_nothing_is_compiled(self, run):
        told = "compiled by fastrack's build, for sm_90"
        assert run() == {"self-test": "ok against the host", "kernels": told, "files": 1, "compiler": False}

    def test_a_device_that_no_cubin_fits_takes_the_ptx(self, run):
        told = "compiled by the driver, from fastrack's PTX for compute_100; fastrack brings no sm_110"
        expected = {"self-test": "ok against the host", "kernels": told, "files": 1, "compiler": False}
        assert run(EMU_COMPUTE="110") == expected

    def test_a_cubin_that_the_driver_refuses_is_told(self, run, package, tmp_path):
        shutil.copytree(package, tmp_path / "damaged")
        (cubin,) = (tmp_path / "damaged/kernels").glob("sm_100-*")
        cubin.write_bytes(lzma.compress(b"damaged"))
        found = run(tmp_path / "damaged", EMU_COMPUTE="100")
        assert found["kernels"].endswith(
            "PTX for compute_100; sm_100 was refused (CUDA_ERROR_INVALID_IMAGE: CUDA_ERROR_INVALID_IMAGE)"
        )
        assert (found["self-test"], found["compiler"]) == ("ok against the host", False)

    @pytest.mark.nightly
    def test_where_the_driver_is_too_old_for_the_ptx_cupy_compiles(self, run):
        found = run(EMU_COMPUTE="110", EMU_PTX="88")
        assert found["kernels"].startswith("compiled by NVRTC 13.0 on this machine; fastrack brings no sm_110; ")
        assert "compute_100 was refused (CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in found["kernels"]
        assert (found["self-test"], found["compiler"]) == ("ok against the host", True)

    def test_a_device_that_nothing_fits_is_refused_with_what_to_do(self, run):
        found = run(EMU_COMPUTE="130", EMU_PTX="88")["self-test"]
        assert found.startswith("not usable: cuda:0 cannot be used: expected kernels for its compute capability 13.0")
        assert "fastrack brings no sm_130; compute_100 was refused (CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in found
        assert "NVRTC 13.0 did not compile them for it. Install a later driver" in found
        assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in found


class TestCalls:
    def test_none_is_made_on_the_wrong_device_and_that_of_the_thread_is_kept(self, calls):
        assert (calls["wrong_device"], calls["current"]) == (0, 0)

    def test_the_current_device_is_asked_for_at_most_four_times_a_message(self, calls):
        assert calls["each"].get("cudaGetDevice", 0) <= 4

    def test_a_small_message_is_at_most_45(self, calls):
        assert calls["all"] <= 45


class TestThreads:
    # Every call that gives up the GIL may have to wait 5 ms for it beside a thread that does not.
    def test_64_mib_take_at_most_three_times_as_long_beside_a_busy_thread(self, times):
        assert times["times"]["large"] <= 3

    def test_4_kib_take_at_most_5_ms_beside_a_busy_thread(self, times):
        assert times["beside"]["small"] <= 5


class TestProcesses:
    def test_a_forked_child_is_refused_and_touches_nothing(self, run_case):
        result = run_case("fork")
        assert "forked" in result["child"]
        assert result["calls_of_child"] == 0
        assert result["parent"]

    def test_a_process_ends_with_work_under_way(self, run_case):
        assert run_case("leave", EMU_DELAY="20000") == "left"


class TestMemory:
    @pytest.mark.parametrize("case", ["pooled_memory", "one_free_block"])
    def test_memory_that_only_the_pool_holds_is_used(self, run_case, case):
        assert run_case(case, EMU_MEMORY=GIB) is None

    def test_a_full_device_is_an_error_that_passes(self, run_case):
        result = run_case("no_memory", EMU_MEMORY=GIB)
        assert "no memory left" in result["full"]
        assert result["freed"]

    def test_a_closed_channel_gives_back_all_it_took(self, run_case):
        used = run_case("memory_given_back", EMU_KERNELS="noop")
        assert len(set(used)) == 1
        assert used[0] <= MIB  # of the result, in CuPy's pool


class TestCapture:
    def test_a_transfer_into_a_capture_is_refused_and_the_capture_stays_valid(self, run_case):
        result = run_case("capture")
        assert "captur" in result.pop("refused", "")
        assert result == {"counter": [3], "arrives": True}

    @pytest.mark.parametrize("moves", ["wrap", "reuse", "channels", "full"])
    def test_transfers_and_a_global_capture_of_another_thread_both_succeed(self, run_case, moves):
        assert run_case(f"{moves}_beside_capture", EMU_MEMORY=GIB) == {"counter": [2], "arrives": True}


class TestLoop:
    def test_batches_are_moved_beside_the_steps_of_a_busy_stream(self, run_case):
        found = run_case("loop", EMU_DELAY="0")
        steps = found["steps"]
        assert len(steps) == len(found["copied"]) == len(found["opened"]) == 6
        for number in range(4):  # two batches are ready, and one more is on its way, before the first step is over
            assert found["copied"][number + 2] < found["opened"][number + 2] < steps[number][1]
        # The loop only puts work on its stream, so it has the last batch before the second step is over.
        assert found["given"][-1] < steps[1][1]
        # And the stream goes from step to step without waiting for a batch.
        assert all(after[0] - before[1] < 0.05 for before, after in pairwise(steps))

    def test_memory_of_a_batch_is_not_used_again_while_a_late_stream_reads_it(self, run_case):
        assert run_case("batches_given_back", EMU_DELAY="0") is True
