"""Functions that take only files of this machine say so of a URL: they make no folder, and repeat no secret."""

from pathlib import Path

import numpy as np
import pytest
from helpers.cases import each
from helpers.commands import invoke

import fastrack
from fastrack import distributed, grants, providers

URL = "s3://user:hunter1@bucket/folder/name.safetensors?signature=hunter2"
CHOICES = {"s3": URL, "https": URL.replace("s3:", "https:"), "a path of it": Path(URL)}

FUNCTIONS = {
    "Key.load": lambda url, key: fastrack.Key.load(url),
    "Key.save": lambda url, key: key.save(url),
    "KeyRing": lambda url, key: fastrack.KeyRing.resolve(url),
    "keys=": lambda url, key: fastrack.unseal(fastrack.seal(np.arange(3), key), url),
    "key=": lambda url, key: fastrack.seal(np.arange(3), url),
    "a wrapped key": lambda url, key: fastrack.unseal(fastrack.seal(np.arange(3), key), f"tpm:sha256:0,7#{url}"),
    "use_keys": lambda url, key: fastrack.use_keys(url),
    "seal_file": lambda url, key: fastrack.seal_file(url, "out.safetensors", key),
    "unseal_file": lambda url, key: fastrack.unseal_file("sealed.safetensors", url, key),
    "seal_folder from": lambda url, key: fastrack.seal_folder(url, "out", key),
    "unseal_folder": lambda url, key: fastrack.unseal_folder("folder", url, key),
    "import_samples from": lambda url, key: fastrack.import_samples(url, "out", key),
    "publish": lambda url, key: fastrack.publish(url, signer=grants.Signer.generate()),
    "publish to": lambda url, key: fastrack.publish("plain", manifest=url, signer=grants.Signer.generate()),
    "load_manifest": lambda url, key: fastrack.load_manifest(url, owner=grants.Signer.generate().verifier),
    "Anchor": lambda url, key: fastrack.Anchor(url),
    "anchor=": lambda url, key: fastrack.load_file("sealed.safetensors", anchor=url),
    "trace": lambda url, key: fastrack.trace(url).__enter__(),
    "Grants.load": lambda url, key: grants.Grants.load(url, owner=grants.Signer.generate().verifier),
    "Identity.load": lambda url, key: grants.Identity.load(url),
    "Identity.save": lambda url, key: grants.Identity.generate().save(url),
    "Signer.load": lambda url, key: grants.Signer.load(url),
    "Signer.save": lambda url, key: grants.Signer.generate().save(url),
    "Verifier.load": lambda url, key: grants.Verifier.load(url),
    "WrappedKey.load": lambda url, key: providers.WrappedKey.load(url),
}  # fmt: skip
TO_STORES = {
    "save_file": lambda url, key: fastrack.save_file({"x": np.arange(3)}, url, key),
    "seal_folder": lambda url, key: fastrack.seal_folder("plain", url, key),
    "import_samples": lambda url, key: fastrack.import_samples("table.txt", url, key),
    "DatasetWriter": fastrack.DatasetWriter,
}
OF_STORES = {"CheckpointWriter": distributed.CheckpointWriter, "CheckpointReader": distributed.CheckpointReader}


@pytest.fixture(autouse=True)
def _files(key):
    Path("plain").mkdir()
    np.save("plain/x.npy", np.arange(3))
    fastrack.save_file({"x": np.arange(3)}, "sealed.safetensors", key)
    fastrack.seal_folder("plain", "folder", key)
    Path("table.txt").write_text("a,b\n1,2\n")
    key.save("a.key")
    grants.Signer.generate().save("a.signer")


@each("choice", CHOICES)
@each("name", FUNCTIONS)
def test_a_function_that_takes_paths_only_refuses_a_url(name, choice, key):
    with pytest.raises((ValueError, OSError, TypeError)) as caught:
        FUNCTIONS[name](CHOICES[choice], key)
    assert "URL" in str(caught.value), caught.value
    assert "hunter" not in str(caught.value)
    assert not list(Path().glob("*:"))


@each("choice", ["https", "a path of it"])
@each("name", TO_STORES)
def test_a_function_that_writes_to_stores_refuses_other_servers_and_paths_of_urls(name, choice, key):
    with pytest.raises((ValueError, OSError), match="URL") as caught:
        TO_STORES[name](CHOICES[choice], key)
    assert "hunter" not in str(caught.value), caught.value
    assert not list(Path().glob("*:"))


@each("name", OF_STORES)
def test_a_checkpoint_is_in_no_path_of_a_url(name, key):
    with pytest.raises(ValueError, match="got a URL") as caught:
        OF_STORES[name](CHOICES["a path of it"], key)
    assert "hunter" not in str(caught.value)


COMMANDS = [
    ["keygen", "{url}"],
    ["key", "{url}"],
    ["seal", "{url}", "out", "-k", "a.key"],
    ["seal", "plain", "{served}", "-k", "a.key"],
    ["seal", "plain/x.npy", "out.safetensors", "-k", "{url}"],
    ["unseal", "sealed.safetensors", "{url}", "-k", "a.key"],
    ["unseal", "sealed.safetensors", "sealed.safetensors", "{folder}", "-k", "a.key"],
    ["unseal", "folder", "{url}", "-k", "a.key"],
    ["import", "table.txt", "{served}", "-k", "a.key"],
    ["import", "{url}", "out", "-k", "a.key"],
    ["publish", "{url}", "--sign", "a.signer"],
    ["verify", "sealed.safetensors", "-k", "a.key", "--anchor", "{url}"],
    ["grant", "{url}", "--passphrase", "--sign", "a.signer"],
]


@each("arguments", COMMANDS, ids=" ".join)
def test_a_command_makes_no_folder_of_a_url(arguments):
    folder = URL.partition(".safetensors")[0]
    places = {"{url}": URL, "{folder}": folder, "{served}": folder.replace("s3:", "https:")}
    result = invoke([places.get(argument, argument) for argument in arguments])
    assert result.exit_code in {1, 2}
    assert isinstance(result.exception, SystemExit), result.exception
    assert "URL" in result.output, result.output
    assert "hunter" not in result.output
    assert not list(Path().glob("*:"))
