"""A sealed model in KServe, by the commands of `examples/kserve`: kserve-storage, S3, a hub, and KServe's server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from helpers import data_hub, store_servers

for module in ("kserve", "kserve_storage", "torch", "yaml"):
    pytest.importorskip(module)

import boto3  # noqa: E402 - of kserve_storage
import torch  # noqa: E402
import yaml  # noqa: E402
from kserve_storage.confidential import CDHSecretResolver, JWEDecryptor  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

from fastrack import Key, seal_folder  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples/kserve"
DOWNLOAD = "import sys; from kserve_storage import Storage; Storage.download(*sys.argv[1:])"
INITIALIZER = "/storage-initializer/scripts/initializer-entrypoint"
NAME = "models/key/owner"
INSTANCES = [[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not EXAMPLES.exists(), reason="the tests run without the examples"),
]


def layers():
    random = np.random.default_rng(1)
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def expected():
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    network.load_state_dict({name: torch.from_numpy(weight) for name, weight in layers().items()})
    with torch.inference_mode():
        return network(torch.tensor(INSTANCES)).tolist()


@pytest.fixture(scope="module")
def key():
    return Key.generate()


@pytest.fixture(scope="module")
def bucket(key, tmp_path_factory):
    """Serve S3 with the sealed folder `network` in the bucket `models`."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "plain").mkdir()
    save_file(layers(), folder / "plain/model.safetensors")
    (folder / "plain/config.json").write_text("{}")
    seal_folder(folder / "plain", folder / "network", key)
    with store_servers.s3(folder):
        store = boto3.client("s3")
        store.create_bucket(Bucket="models")
        for file in (folder / "network").iterdir():
            store.upload_file(str(file), "models", f"network/{file.name}")
        yield store


@pytest.fixture
def hub(key):
    with data_hub.running({NAME: bytes(key.material())}) as server:
        yield server


@pytest.fixture
def pod(bucket, hub, tmp_path):
    """Return the variables of containers, after making a folder for each of their volumes."""
    assert bucket.list_objects(Bucket="models")
    for name in ("models", "tmp"):
        (tmp_path / name).mkdir()
    return {**os.environ, "CDH_ADDR": hub.address, "TMPDIR": str(tmp_path / "tmp")}


def run(command, pod):
    return subprocess.run(command, env=pod, capture_output=True, text=True, check=False, timeout=60)


def download(uri, target, pod):
    return run([sys.executable, "-c", DOWNLOAD, uri, target], pod)


def verify(folder, pod):
    return run([sys.executable, "-m", "fastrack", "verify", folder, "--key", f"kbs:///{NAME}"], pod)


def resource(name, number=0):
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))[number]["spec"]


def command_of(container, folder):
    """Return the command of a container, with this Python and this folder in the place of its own."""
    own = {"fastrack": [sys.executable, "-m", "fastrack"], "python": [sys.executable]}
    words = [word for each in (*container["command"], *container["args"]) for word in own.get(each, [each])]
    return [
        word.replace("/mnt/models", str(folder)).replace("predictor.py", str(EXAMPLES / "predictor.py"))
        for word in words
    ]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def ask(port, server):
    """Return what the server answers, once it does."""
    body = json.dumps({"instances": INSTANCES}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/models/network:predict", body, {"Content-Type": "application/json"}
    )
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return json.loads(reply.read())["predictions"]
        except urllib.error.URLError:
            assert server.poll() is None, server.communicate()
            assert time.monotonic() < end
            time.sleep(0.2)


def bytes_below(*folders):
    files = (path for folder in folders for path in Path(folder).rglob("*") if path.is_file())
    return b"".join(file.read_bytes() for file in files)


def test_a_server_in_python_answers_as_from_the_plain_folder(pod, tmp_path, hub):
    predictor = resource("inference-service.yaml")["predictor"]
    (container,) = predictor["containers"]
    (uri,) = [variable["value"] for variable in container["env"] if variable["name"] == "STORAGE_URI"]
    done = download(uri, tmp_path / "models", pod)
    assert done.returncode == 0, done.stderr
    assert hub.asked == []
    port = free_port()
    command = [*command_of(container, tmp_path / "models"), f"--http_port={port}", "--enable_grpc=false"]
    with subprocess.Popen(command, env=pod, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert ask(port, server) == expected()
            found = bytes_below(tmp_path)
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=30)
    assert {path for path, _ in hub.asked} == {f"/cdh/resource/{NAME}"}
    assert layers()["0.weight"].tobytes() not in found
    assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]  # copies of what is plain


@pytest.mark.parametrize("is_swapped", [False, True])
def test_no_server_starts_without_its_key_or_its_model(pod, tmp_path, hub, is_swapped):
    download("s3://models/network", tmp_path / "models", pod)
    if is_swapped:
        shard = tmp_path / "models/model.safetensors"
        other = Path(tmp_path, "other")
        seal_folder(_plain(tmp_path), other, Key.generate())
        shard.unlink()
        os.link(other / shard.name, shard)
    else:
        hub.refused.add(NAME)
    (container,) = resource("inference-service.yaml")["predictor"]["containers"]
    command = [*command_of(container, tmp_path / "models"), f"--http_port={free_port()}"]
    done = run(command, pod)
    assert done.returncode == (4 if is_swapped else 5)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert ("model.safetensors" if is_swapped else "kbs:///") in done.stderr


def _plain(folder):
    (folder / "plain").mkdir()
    save_file(layers(), folder / "plain/model.safetensors")
    return folder / "plain"


def test_kserves_decrypter_leaves_a_sealed_folder_as_it_is(pod, tmp_path, hub):
    download("s3://models/network", tmp_path / "models", pod)
    before = bytes_below(tmp_path / "models")
    decryptor = JWEDecryptor(CDHSecretResolver(hub.address), f"kbs:///{NAME}")
    assert decryptor.decrypt_directory(tmp_path / "models") == []
    assert bytes_below(tmp_path / "models") == before
    assert hub.asked == []


def test_a_file_url_gives_links_which_open_as_the_folder(pod, tmp_path, key):
    seal_folder(_plain(tmp_path), tmp_path / "sealed", key)
    assert download(f"file://{tmp_path}/sealed", tmp_path / "models", pod).returncode == 0
    assert (tmp_path / "models/model.safetensors").is_symlink()
    assert verify(tmp_path / "models", pod).returncode == 0


def test_an_empty_file_which_kserve_does_not_download_is_named(pod, tmp_path, bucket, key):
    (_plain(tmp_path) / "empty.txt").touch()
    seal_folder(tmp_path / "plain", tmp_path / "sealed", key, plain=["*.txt"])
    for file in (tmp_path / "sealed").iterdir():
        bucket.upload_file(str(file), "models", f"with-empty/{file.name}")
    download("s3://models/with-empty", tmp_path / "models", pod)
    done = verify(tmp_path / "models", pod)
    assert done.returncode == 4
    assert "empty.txt" in done.stderr + done.stdout


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_storage_container_decrypts_into_its_volume(pod, tmp_path, hub, is_refused):
    container = resource("storage-container.yaml")["container"]
    (form,) = resource("storage-container.yaml")["supportedUriFormats"]
    uri = resource("storage-container.yaml", 1)["predictor"]["model"]["storageUri"]
    assert uri.startswith(form["prefix"])
    (tmp_path / "initializer").write_text(DOWNLOAD)
    own = {
        INITIALIZER: f'"{sys.executable}" "{tmp_path}/initializer"',
        "fastrack ": f'"{sys.executable}" -m fastrack ',
        "/tmp/sealed": str(tmp_path / "sealed"),
    }
    command = list(container["command"])
    for word, replacement in own.items():
        assert word in command[2]
        command[2] = command[2].replace(word, replacement)
    if is_refused:
        hub.refused.add(NAME)
    for _ in range(2):  # Kubernetes may run it again
        done = run([*command, uri, tmp_path / "models"], pod)
        assert done.returncode == (5 if is_refused else 0), done.stderr
    assert run([*command, uri, tmp_path / "models", uri, tmp_path / "more"], pod).returncode == 1
    found = bytes_below(tmp_path / "models")
    assert (layers()["0.weight"].tobytes() in found) is not is_refused
    assert bool(found) is not is_refused
