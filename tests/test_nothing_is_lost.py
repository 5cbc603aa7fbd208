"""Work that only a `with` statement or a call stores is reported where neither comes, as a warning and in the log."""

import contextlib
import gc
import os
import re
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import file_systems
from helpers.forking import in_forked_child
from helpers.reports import reports
from helpers.staged import staged_channel
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, DatasetWriter, Key, Vault
from fastrack._transfer.prefetch import PrefetchLoader

torch = pytest.importorskip("torch")
from fastrack.distributed import SecureGroup  # noqa: E402 - it needs torch
from fastrack.distributed._group import Told  # noqa: E402

KEY = Key.from_bytes(bytes(range(32)))
GOOD = fastrack.seal(np.arange(9), KEY, name="good")
BAD = tampered(fastrack.seal(np.arange(9), KEY, name="bad"), -1)


def written(folder):
    writer = DatasetWriter(folder / "samples", KEY)
    for number in range(5):
        writer.write({"x": number})
    return writer


def begun(folder):
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    block = contextlib.ExitStack()  # as a notebook or a class keeps it
    path = block.enter_context(fastrack.write_folder(folder / "model", KEY))
    save_file({"x": np.arange(3)}, f"{path}/model.safetensors")
    return block


def put(_):
    vault = Vault(Store())
    vault.kept = vault.put("x", np.arange(3))
    return vault


class Store(dict):
    """A mapping that counts as a store."""


def ahead(_):
    loader = PrefetchLoader({"good": GOOD, "bad": BAD}, lambda part: fastrack.to_device(part, keys=KEY))
    loader._pool.submit(int).result()  # the one thread has opened both
    return loader


def sent(_):
    channel = staged_channel(keys=KEY)
    channel.to_device(BAD, framework="numpy", non_blocking=True)
    channel._device.settle()
    return channel


def failed(_):
    group = SecureGroup.__new__(SecureGroup)
    group._process, group._thread, group._error = os.getpid(), ThreadPoolExecutor(1), AuthenticationError("altered")
    group._link, group._failed = SimpleNamespace(close=lambda: None), [Told()]
    group._failed[0].set_exception(group._error)
    return group


LOSING = {
    "DatasetWriter": (written, "samples: 5 samples were not stored: expected close()"),
    "write_folder": (begun, "model: 1 sealed files were not stored: expected close()"),
    "Vault": (put, "1 tensors of a vault were left in its store: expected close()"),
    "PrefetchLoader": (ahead, "a tensor that was opened ahead failed (tensor 'bad', chunk 0"),
    "Channel": (sent, "tensor 'bad', chunk 0"),
    "SecureGroup": (failed, "an operation of a group failed, and no call was left to raise it: altered"),
}
"""The objects whose work only an end by the caller stores, or whose failures only it raises."""

OTHERS = {
    "use_keys SealedFile safe_open Mount OpenMessage _SealedBytes": "only read, and keep nothing to store",
    "PreemptionNotice": "keeps the handlers of signals until the process ends",
    "_Draft _Writer PushedBytes MessageRecorder _Packing Connection _Bounded": "used by calls of fastrack in blocks",
    "CloseGuard Transfer BufferLease PlainSealer StagingPool Owners CollectiveOperation": "as those before",
    "Device CpuDevice CudaDevice Pipeline BesideCaptures _Current": "belong to a Channel, which reports",
    "DeviceOperation CpuOperation CudaOperation": "belong to a call, or to the owners of a Channel",
    "Link HostPlace CudaPlace Transport PointToPoint SealedProcessGroup": "belong to a SecureGroup",
    "CheckpointWriter": "ended by torch, whose save raises, and whose async_save has a future",
    "_Iterator": "has batches, which a loader gives again",
    "Journal TourLedger DeviceCollateral": "store each call by itself",
    "_Server": "answers, and stores by a Journal",
    "SealedAdapter SealedTier": "have threads that Python waits for, and files that a miss replaces",
    "Pages HostPages CudaPages PagedSealer SealedWorker": "belong to a worker; what was not stored or loaded is a miss",
    "Lease Launcher": "end what others may use, and have nothing to store",
}


def test_every_object_that_a_call_ends_is_listed():
    ends = re.compile(r"^class (\w+)|^    (?:async )?def (?:__exit__|close|finish|complete|shutdown)\(", re.MULTILINE)
    found = set()
    for path in Path(fastrack.__file__).parent.rglob("*.py"):
        name = None
        for match in ends.finditer("" if "_bench" in path.parts else path.read_text(encoding="utf-8")):
            name = match[1] or name
            found |= set() if match[1] else {name}
    listed = {name for names in OTHERS for name in names.split()}
    assert found == (LOSING.keys() - {"write_folder"}) | listed
    assert not listed & LOSING.keys()


def make_all(folder):
    return [make(folder / name) for name, (make, _) in LOSING.items()]


def test_what_is_lost_is_reported_when_the_object_ends(tmp_path):
    for name, (make, told) in LOSING.items():
        owner = make(tmp_path / name)
        watched = weakref.ref(owner)
        with reports() as reported:
            del owner
            if name == "SecureGroup":  # whose errors refer to it
                gc.collect()
        assert watched() is None, name
        assert len(reported) == 1, name
        assert told in reported[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_error_on_the_way_is_no_end_of_the_object(tmp_path):
    def fail(owners):
        raise ZeroDivisionError(len(owners))

    with reports() as reported:
        with pytest.raises(ZeroDivisionError):
            fail(make_all(tmp_path))
        gc.collect()
    assert all(any(told in each for each in reported) for _, told in LOSING.values())
    assert len(reported) == len(LOSING)


def test_what_a_call_has_ended_is_not_reported(tmp_path):
    with reports() as reported:
        owners = make_all(tmp_path)
        for owner in owners:
            with contextlib.suppress(AuthenticationError):  # which is how some tell
                owner.close()
        del owners, owner
        gc.collect()
    assert not reported


def test_a_forked_child_reports_nothing_of_its_parent(tmp_path):
    owners = make_all(tmp_path)

    def end():
        with reports() as reported:
            owners.clear()
            gc.collect()
        return reported

    assert in_forked_child(end) == []
    with reports() as reported:
        owners.clear()
        gc.collect()
    assert len(reported) == len(LOSING)


def test_an_error_in_the_block_is_the_report(tmp_path):
    with reports() as reported:
        for make in (written, begun, put):
            with pytest.raises(ZeroDivisionError), make(tmp_path):
                raise ZeroDivisionError
        gc.collect()
    assert not reported


def test_a_close_that_raises_has_told(tmp_path):
    with reports() as reported:
        writer = written(tmp_path)
        with pytest.raises(OSError, match="free some space"), file_systems.full():
            writer.close()
        del writer
        gc.collect()
    assert not reported


def test_what_is_stored_in_part_is_counted(tmp_path):
    with reports() as reported:
        writer = DatasetWriter(tmp_path, KEY, shard_size=16)
        for number in range(5):
            writer.write({"x": number})
        del writer
    assert reported[0].startswith(f"{tmp_path}: 1 samples were not stored")
    with DatasetWriter(tmp_path, KEY) as writer:
        assert writer.stored == 4


def test_a_trace_that_is_dropped_is_written(tmp_path):
    block = fastrack.trace(tmp_path / "trace.json")
    block.__enter__()
    del block
    gc.collect()
    assert (tmp_path / "trace.json").read_bytes()


PROGRAM = """
import os, sys
import numpy as np
import fastrack
os.chdir(sys.argv[1])
key = fastrack.Key.generate()
writer = fastrack.DatasetWriter("samples", key)
writer.write({"x": 1})
vault = fastrack.Vault({})
ticket = vault.put("x", np.ones(3))
block = fastrack.write_folder("model", key)
from safetensors.numpy import save_file
save_file({"x": np.ones(3)}, block.__enter__() + "/model.safetensors")
if not os.fork():
    sys.exit()
os.wait()
"""


@pytest.mark.parametrize(
    "filters",
    [
        pytest.param([], marks=pytest.mark.slow, id="logged"),
        pytest.param(["-W", "error"], marks=pytest.mark.nightly, id="errors"),
    ],
)
def test_a_process_that_ends_reports_what_its_variables_have(filters, tmp_path):
    command = [sys.executable, *filters, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    for told in ("samples: 1 samples", "1 tensors of a vault", "model: 1 sealed files"):
        assert done.stderr.count(told) == (2 if filters else 1)  # logged, and a warning that is an error; no child's
    assert ("ResourceWarning" in done.stderr) == bool(filters)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
