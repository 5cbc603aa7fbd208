"""URLs in the place of paths."""

import sys

import pytest
from helpers.range_server import RangeServer

import fastrack


@pytest.fixture
def url(folder, sealed, monkeypatch, tmp_path):
    monkeypatch.delenv("FASTRACK_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from fastrack._net import connections

    with RangeServer(folder) as server:
        yield server.url(str(sealed))
    connections.pool.clear()


def test_a_file_on_a_server_is_verified_shown_and_unsealed(cli, key, url, folder):
    assert cli.json(f"verify {url}?secret=hunter2 {key}")["path"] == url
    assert cli.json(f"inspect {url}")["path"] == url
    cli(f"unseal {url} back.safetensors {key}")
    cli(f"rekey {url} again.safetensors {key} --new {key.split()[-1]}")
    assert (folder / "again.safetensors").is_file()
    said = cli(f"verify {url} again.safetensors {key}").stdout
    assert "2 files" in said


def test_the_output_leaves_out_the_query(cli, key, url):
    secret = f"{url}?secret=hunter2"
    assert cli.json(f"rekey {secret} new.safetensors {key} --new {key.split()[-1]}")["source"] == url
    missing = secret.replace("sealed", "none")
    assert "hunter2" not in cli(f"verify {missing} {secret} {key} --json", status=1).output


def test_an_error_names_the_url(cli, key, url):
    other = url.replace("sealed", "none")
    assert other in cli(f"verify {other} {key}", status=1).stderr.replace("\n", "")


def test_a_file_is_sealed_to_a_store(cli, key, arrays, url):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    cli(f"unseal {url} plain.safetensors {key}")
    said = cli(f"seal plain.safetensors memory://bucket/sealed.safetensors {key}").stdout
    assert "memory://bucket/sealed.safetensors" in said
    with fastrack.load_file("memory://bucket/sealed.safetensors") as file:
        assert sorted(file) == sorted(arrays)
    cli(f"seal plain.safetensors memory://bucket/sealed.safetensors {key}", status=1)
    cli(f"seal plain.safetensors memory://bucket/sealed.safetensors {key} --force")


@pytest.mark.parametrize("line", ["verify", "inspect", "verify another"])
@pytest.mark.usefixtures("folder")
def test_a_store_without_its_packages_is_an_error_that_names_them(cli, key, monkeypatch, line):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    options = "" if line == "inspect" else key
    said = cli(f"{line} s3://bucket/name {options}", status=1).stderr
    assert "error: s3://bucket/name: expected the package that fsspec needs" in said


@pytest.mark.parametrize("line", ["import s3://bucket/name samples", "seal s3://bucket/name sealed"])
@pytest.mark.usefixtures("folder")
def test_a_url_in_the_place_of_a_path_is_bad_usage(cli, key, line):
    assert "expected a path on this machine" in cli(f"{line} {key}", status=2).stderr


def test_a_dry_run_stores_nothing(cli, key, url, folder):
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    (folder / "study").mkdir()
    (folder / "study/a.txt").write_bytes(b"a")
    store = fsspec.filesystem("memory")
    for source, target in (("study/a.txt", "dry/a.safetensors"), ("study", "dry/study"), ("-r study", "dry/files")):
        said = cli(f"seal {source} memory://{target} {key} --dry-run").stdout
        assert f"memory://{target}" in said
        assert "othing was written" in said
    cli(f"rekey {url} memory://dry/again.safetensors {key} --new {key.split()[-1]} --dry-run")
    assert store.find("/dry") == []
