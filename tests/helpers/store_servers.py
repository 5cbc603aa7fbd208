"""Servers of object stores on loopback, each with an empty bucket: moto's S3, Azurite, an emulator of Google's.

Azurite is the one of FASTRACK_AZURITE, or the ``azurite-blob`` on the path. The emulator of Google's store compares no
generations, so what is written there on a condition is not tried.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
import uuid

import pytest

AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # public
AZURE = "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={};BlobEndpoint=http://127.0.0.1:{}/{};"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def s3(_folder):
    """Serve a bucket of S3, by moto or FASTRACK_S3_ENDPOINT."""
    for module in ("s3fs", "boto3"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    given = os.environ.get("FASTRACK_S3_ENDPOINT")
    server = None
    if given is None:
        moto = pytest.importorskip("moto.server", reason="moto's server is not installed")
        server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        given = "http://{}:{}".format(*server.get_host_and_port())
    secrets = {"AWS_ACCESS_KEY_ID": "test:tester", "AWS_SECRET_ACCESS_KEY": "testing"}
    with environment({"AWS_ENDPOINT_URL": given, "AWS_DEFAULT_REGION": "us-east-1", **secrets}):
        yield "s3"
    if server is not None:
        server.stop()


@contextlib.contextmanager
def az(folder):
    """Serve a container of Azure's, by Azurite."""
    pytest.importorskip("adlfs", reason="adlfs is not installed")
    program = os.environ.get("FASTRACK_AZURITE") or shutil.which("azurite-blob")
    if not program:
        pytest.skip("Azurite is not installed")
    port = free_port()
    options = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--inMemoryPersistence"]
    command = [program, *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(port)
            with environment({"AZURE_STORAGE_CONNECTION_STRING": AZURE.format(AZURITE_KEY, port, "devstoreaccount1")}):
                yield "az"
        finally:
            server.terminate()


@contextlib.contextmanager
def gs(_folder):
    """Serve a bucket of Google's, by gcp-storage-emulator."""
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed")
    port = free_port()
    # Without the second, which it reads when it is imported, gcsfs asks by gRPC for the kind of a bucket, for a minute.
    names = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    with environment(names):
        pytest.importorskip("gcsfs", reason="gcsfs is not installed")
        import fsspec

        server = emulator.create_server("127.0.0.1", port, in_memory=True)
        server.start()
        fsspec.config.conf.update({name: {"token": "anon", "project": "test"} for name in ("gs", "gcs")})
        yield "gs"
        fsspec.config.conf.clear()
        server.stop()


SERVERS = {"s3": s3, "az": az, "gs": gs}


@contextlib.contextmanager
def bucket(scheme, folder):
    """Serve a new bucket, and yield its URL."""
    with SERVERS[scheme](folder):
        import fsspec

        name = f"fastrack-{uuid.uuid4().hex[:12]}"
        store = fsspec.filesystem(scheme)
        store.mkdir(name)
        yield f"{scheme}://{name}"
        type(store).clear_instance_cache()


@contextlib.contextmanager
def environment(values):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


def wait_for(port):
    for _ in range(300):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on {port}")
