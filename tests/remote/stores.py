"""Servers on loopback as fixtures, each skipped where it is not installed: S3 of moto and of Swift, nginx."""

import contextlib
import getpass
import os
import shutil
import subprocess
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import swift

from fastrack._remote.listing import list_objects
from fastrack._remote.upload import list_names
from fastrack._util.locations import Url

NGINX = """daemon off;
user {user};
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; root {folder}/served; }}
}}
"""


@pytest.fixture(scope="session")
def swift_server(tmp_path_factory):
    """OpenStack Swift, running."""
    if not swift.is_installed():
        pytest.skip("Swift is not installed; `make swift` does that")
    with swift.Swift(tmp_path_factory.mktemp("swift")) as server:
        yield server


@pytest.fixture(scope="module", params=["moto", "swift"])
def endpoint(request):
    """The address of an S3 server: of moto, of Swift, or that which the environment names."""
    given = os.environ.get("FASTRACK_S3_ENDPOINT")
    if request.param == "swift":
        yield request.getfixturevalue("swift_server").endpoint
    elif given:
        yield given
    else:
        moto = pytest.importorskip("moto.server", reason="moto's server is not installed")
        server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def bucket(endpoint, monkeypatch):
    """A new bucket of `endpoint`: a client of boto3, whose `name` it is."""
    yield from new_bucket(endpoint, monkeypatch)


@pytest.fixture
def swift_bucket(swift_server, monkeypatch):
    """A new bucket of Swift."""
    yield from new_bucket(swift_server.endpoint, monkeypatch)


def new_bucket(endpoint, monkeypatch):
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    import fsspec

    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for name, value in (
        ("ACCESS_KEY_ID", swift.USER),
        ("SECRET_ACCESS_KEY", swift.PASSWORD),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", os.environ.get(f"FASTRACK_S3_{name}", value))
    client = boto3.client("s3")
    client.name = f"fastrack-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=client.name)
    fsspec.config.conf.clear()
    yield client
    s3fs.S3FileSystem.clear_instance_cache()


def list_below(url):
    """List the objects below a URL as datasets do: the name, the size and the validator of each."""
    return list_objects(Url(url))


def names_below(url):
    """List the names below a URL as writers do, who look at what is there."""
    return list_names(Url(url))


def upload(client, folder, prefix):
    """Put the files of a folder into a bucket."""

    def put(path):
        client.put_object(Bucket=client.name, Key=f"{prefix}/{path.name}", Body=path.read_bytes())

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(put, sorted(folder.iterdir())))


class Nginx:
    """nginx, which serves `folder` at `url`, and notes what it was asked for."""

    def __init__(self, folder):
        self.folder = folder / "served"
        self.folder.mkdir()
        [port] = swift.free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "access.log"
        configuration = folder / "nginx.conf"
        configuration.write_text(NGINX.format(folder=folder, port=port, user=getpass.getuser()))
        command = ["nginx", "-c", configuration, "-p", folder, "-e", folder / "error.log"]
        self._process = subprocess.Popen(command)

    def wait(self):
        for _ in range(200):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self.url).close()
            if self._log.exists() and self._log.stat().st_size:
                return
            time.sleep(0.05)

    def requests(self):
        return [line for line in self._log.read_text().splitlines() if "Python-urllib" not in line]

    def stop(self):
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture
def nginx(tmp_path_factory):
    """nginx, serving an empty folder."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    folder = tmp_path_factory.mktemp("nginx")
    folder.chmod(0o755)
    server = Nginx(folder)
    try:
        server.wait()
        yield server
    finally:
        server.stop()
