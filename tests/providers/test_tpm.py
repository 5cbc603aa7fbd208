"""Keys sealed by a TPM 2.0: swtpm, started by the test."""

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.cases import each
from helpers.commands import invoke

import fastrack
from fastrack.errors import FormatError, ProviderError
from fastrack.providers import Tpm, WrappedKey, open_wrapper


class Machine:
    """A TPM in a process of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.tcti = f"swtpm:path={folder}/socket"
        self.process = None

    def start(self):
        command = [shutil.which("swtpm"), "socket", "--tpm2", "--tpmstate", f"dir={self.folder}"]
        command += ["--server", f"type=unixio,path={self.folder}/socket"]
        command += ["--ctrl", f"type=unixio,path={self.folder}/socket.ctrl", "--flags", "not-need-init,startup-clear"]
        self.process = subprocess.Popen(command)
        for _ in range(500):
            if (self.folder / "socket.ctrl").exists():
                return
            time.sleep(0.02)
        raise TimeoutError("swtpm did not start")

    def stop(self):
        self.process.terminate()
        self.process.wait(20)
        for name in ("socket", "socket.ctrl"):
            (self.folder / name).unlink(missing_ok=True)

    def extend(self, pcr):
        from tpm2_pytss import ESAPI, ESYS_TR, TPM2_ALG, TPML_DIGEST_VALUES, TPMT_HA, TPMU_HA

        digest = TPMT_HA(hashAlg=TPM2_ALG.SHA256, digest=TPMU_HA(sha256=b"x" * 32))
        with ESAPI(self.tcti) as tpm:
            tpm.pcr_extend(ESYS_TR(pcr), TPML_DIGEST_VALUES([digest]))

    def transient_handles(self):
        from tpm2_pytss import ESAPI, TPM2_CAP

        with ESAPI(self.tcti) as tpm:
            _, found = tpm.get_capability(TPM2_CAP.HANDLES, 0x80000000, 16)
            _, sessions = tpm.get_capability(TPM2_CAP.HANDLES, 0x02000000, 16)
            return len(found.data.handles) + len(sessions.data.handles)


@pytest.fixture(scope="module")
def machines():
    """Yield a function that starts TPMs. Their sockets need short paths."""
    pytest.importorskip("tpm2_pytss", reason="needs tpm2-pytss, which is built with libtss2-dev")
    if shutil.which("swtpm") is None:
        pytest.skip("needs swtpm: apt-get install swtpm")
    with tempfile.TemporaryDirectory(prefix="tpm") as folder:
        started = []

        def start(name):
            path = Path(folder) / name
            path.mkdir()
            machine = Machine(path)
            machine.start()
            started.append(machine)
            return machine

        yield start
        for machine in started:
            machine.stop()


@pytest.fixture(scope="module")
def machine(machines):
    return machines("a")


@pytest.fixture
def tcti(machine, monkeypatch):
    monkeypatch.setenv("TPM2TOOLS_TCTI", machine.tcti)
    return machine.tcti


@pytest.mark.usefixtures("tcti")
@each("bits", [128, 256])
@each("pcrs", ["", "sha256:0,7", "sha256:1+sha384:2"])
def test_a_key_that_the_tpm_sealed_opens_what_it_sealed(machine, tmp_path, bits, pcrs):
    key = fastrack.Key.generate(bits)
    path = tmp_path / "owner.key.wrapped"
    wrapped = open_wrapper(f"tpm:{pcrs}").wrap(key)
    wrapped.save(path)
    assert wrapped.parameters.get("pcrs", "") == pcrs
    assert bytes(key.material()) not in wrapped.to_bytes() + wrapped.ciphertext
    sealed = fastrack.seal(np.arange(5), path)
    assert fastrack.unseal(sealed, keys=path, framework="numpy").tolist() == [0, 1, 2, 3, 4]
    assert fastrack.unseal(sealed, keys=f"tpm:#{path}", framework="numpy").tolist() == [0, 1, 2, 3, 4]
    assert machine.transient_handles() == 0


@pytest.mark.usefixtures("tcti")
def test_the_command_makes_a_file_and_seals_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.arange(3))
    for line in (
        ["keygen", "owner.key.wrapped", "--wrap", "tpm:sha256:7"],
        ["seal", "x.npy", "x.safetensors", "--key", "owner.key.wrapped"],
        ["verify", "x.safetensors", "--key", "owner.key.wrapped"],
    ):
        result = invoke(line)
        assert result.exit_code == 0, result.output


def test_a_key_sealed_to_pcrs_opens_in_that_state_alone(machine, tcti, key):
    bound, free = Tpm(pcrs="sha256:16,23").wrap(key), Tpm().wrap(key)
    assert bound.unwrap() == key
    machine.extend(23)
    with pytest.raises(ProviderError, match="the policy does not hold: a PCR has another value"):
        bound.unwrap()
    with pytest.raises(ProviderError, match="code 0x"):  # the policy is in the object, not in the file's members
        dataclasses.replace(bound, parameters={"parent": bound.parameters["parent"]}).unwrap()
    with pytest.raises(ProviderError, match="the policy does not hold"):
        dataclasses.replace(bound, parameters={**bound.parameters, "pcrs": "sha256:0"}).unwrap()
    assert free.unwrap(Tpm(tcti=tcti)) == key
    assert machine.transient_handles() == 0


def test_a_restart_keeps_the_key_and_another_tpm_does_not_open_it(machines, key):
    first, second = machines("b"), machines("c")
    wrapped = Tpm(tcti=first.tcti).wrap(key)
    with pytest.raises(ProviderError, match="expected the TPM that wrapped it, got another"):
        wrapped.unwrap(Tpm(tcti=second.tcti))
    first.stop()
    first.start()
    assert wrapped.unwrap(Tpm(tcti=first.tcti)) == key


class Tap:
    """Two sockets that pass on what goes to and from a TPM, and keep a copy."""

    def __init__(self, machine, folder):
        self.copy = bytearray()
        self.tcti = f"swtpm:path={folder}/socket"
        self._sockets = []
        for name in ("socket", "socket.ctrl"):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"{folder}/{name}")
            listener.listen()
            self._sockets.append(listener)
            threading.Thread(target=self._accept, args=(listener, f"{machine.folder}/{name}"), daemon=True).start()

    def _accept(self, listener, path):
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(path)
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.copy += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self):
        for open_socket in self._sockets:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()


def test_no_key_is_on_the_way_to_the_tpm(machine, key):
    secret = bytes(key.material())
    with tempfile.TemporaryDirectory(prefix="tap") as folder:
        tap = Tap(machine, folder)
        try:
            for pcrs in ("", "sha256:7"):
                provider = Tpm(pcrs=pcrs, tcti=tap.tcti)
                assert provider.unwrap(provider.wrap(key)) == key
        finally:
            tap.close()
    assert len(tap.copy) > 1000
    assert secret not in tap.copy


@pytest.mark.usefixtures("tcti")
def test_what_the_tpm_gives_is_wiped(key, monkeypatch):
    from fastrack.providers import _tpm

    wiped, wipe = [], _tpm._wipe

    def watch(view):
        assert bytes(view) == bytes(key.material())
        wipe(view)
        wiped.append(bytes(view))

    monkeypatch.setattr(_tpm, "_wipe", watch)
    assert Tpm().wrap(key).unwrap() == key
    assert wiped == [bytes(32), bytes(32)]


@pytest.mark.usefixtures("tcti")
def test_an_altered_file_is_refused(machine, key):
    wrapped = Tpm().wrap(key)
    for place in range(0, len(wrapped.ciphertext), 9):
        altered = bytearray(wrapped.ciphertext)
        altered[place] ^= 1
        with pytest.raises((ProviderError, FormatError)):
            dataclasses.replace(wrapped, ciphertext=bytes(altered)).unwrap()
    for ciphertext in (b"x", wrapped.ciphertext[:-1], wrapped.ciphertext + b"x"):
        with pytest.raises(FormatError, match="expected a sealed object"):
            dataclasses.replace(wrapped, ciphertext=ciphertext).unwrap()
    for members in ({"key_id": "0" * 32}, {"bits": 128}):
        with pytest.raises(ProviderError, match="altered"):
            dataclasses.replace(wrapped, **members).unwrap()
    assert machine.transient_handles() == 0


def test_a_tpm_that_is_not_there_is_named(key, monkeypatch, capfd):
    pytest.importorskip("tpm2_pytss", reason="needs tpm2-pytss, which is built with libtss2-dev")
    monkeypatch.setenv("TPM2TOOLS_TCTI", "swtpm:path=/nowhere")
    with pytest.raises(ProviderError, match=r"no TPM could be reached. Set TPM2TOOLS_TCTI"):
        Tpm().wrap(key)
    assert os.environ.get("TSS2_LOG")
    assert capfd.readouterr().err == ""


@each("pcrs", ["0", "sha1:0", "sha256:", "sha256:24", "sha256:0,", "sha256:all", "sha256:0+", "sha256:00"])
def test_other_pcrs_are_refused(pcrs):
    with pytest.raises(ValueError, match="such as sha256:0,7"):
        Tpm(pcrs=pcrs)


@each("parameters", [{}, {"parent": "00"}, {"parent": "0" * 68, "pcrs": "sha1:0"}, {"parent": "0" * 68, "x": "y"}])
def test_other_parameters_are_refused(parameters):
    with pytest.raises(FormatError, match="is wrong"):
        WrappedKey("tpm", "TPM2-SEALED", "0" * 32, 256, b"x", parameters).unwrap()
