"""S3 with the tokens of a `credential_process`, which end in the run: no read and no upload fails. By s3fs itself."""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.token_store import TokenStore
from stores import list_below

import fastrack

s3fs = pytest.importorskip("s3fs", "2025.5", reason="no s3fs of 2025.5 or later is installed")

pytestmark = pytest.mark.slow

# As the AWS SDKs and Tools Reference Guide has it, "Process credential provider". `{minutes}` is the life it tells.
PROCESS = """import datetime, json, pathlib
end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes={minutes})
told = dict(Version=1, AccessKeyId="AKIAEXAMPLE", SecretAccessKey="s", SessionToken=pathlib.Path("token").read_text())
print(json.dumps(dict(told, Expiration=end.isoformat())))
"""


class Tokens:
    """The tokens of a process: `end` ends the one that it tells, at the server too, and it tells the next."""

    def __init__(self, server):
        self.server, self.number = server, 0
        self.end()

    def end(self, *_):
        self.server.ended.add(f"token-{self.number}")
        self.number += 1
        Path("token").write_text(f"token-{self.number}")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of S3 whose clients have no other credentials than those of the process."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    (tmp_path / "config").write_text(
        f"[default]\nregion = us-east-1\ncredential_process = {sys.executable} {tmp_path}/process.py\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with TokenStore() as started:
        monkeypatch.setenv("AWS_ENDPOINT_URL", started.url)
        s3fs.S3FileSystem.clear_instance_cache()
        yield started
        s3fs.S3FileSystem.clear_instance_cache()


# botocore asks the process before each request in the last ten minutes that it tells. With an hour it does not know of
# an end that comes early, as of a role whose sessions are revoked.
@pytest.mark.parametrize("minutes", [3, 60])
def test_no_read_or_upload_fails_when_its_token_ends_twice(minutes, server, key, tmp_path):
    (tmp_path / "process.py").write_text(PROCESS.format(minutes=minutes))
    tokens = Tokens(server)
    images = np.random.default_rng(1).integers(0, 256, (80, 1 << 18), np.uint8)  # more than a part
    url = "s3://bucket/train/a.safetensors"

    def end_twice(_method, query):
        if "uploads" in query or query.get("partNumber") == "1":
            tokens.end()

    server.after = end_twice
    fastrack.save_file({"images": images}, url, key)
    server.after = lambda *_: None
    assert tokens.number == 3
    assert not server.uploads
    with fastrack.load_file(url) as file:
        for row in (3, 40, 70):
            opened = fastrack.unseal(file["images"][[row]], key, framework="numpy")
            np.testing.assert_array_equal(opened, images[[row]])
            tokens.end()
    np.save("x.npy", np.arange(3))
    fastrack.seal_file("x.npy", "s3://bucket/b", key, overwrite=False)  # a single request, after one by HEAD
    tokens.end()
    with pytest.raises(FileExistsError):
        fastrack.seal_file("x.npy", "s3://bucket/b", key, overwrite=False)
    tokens.end()
    assert [name for name, *_ in list_below("s3://bucket/train/")] == ["a.safetensors"]
    fastrack.verify_file(url, key)


def test_a_url_ends_with_its_credentials(server, key, tmp_path):
    (tmp_path / "process.py").write_text(PROCESS.format(minutes=20))
    Tokens(server)
    fastrack.save_file({"x": np.arange(3)}, "s3://bucket/a", key)
    server.asked.clear()
    assert fastrack.load_file("s3://bucket/a")
    assert {int(query["X-Amz-Expires"]) in range(1100, 1201) for _, _, query in server.asked} == {True}


def test_credentials_that_stay_ended_are_told(server, key, tmp_path):
    (tmp_path / "process.py").write_text(PROCESS.format(minutes=60))
    Tokens(server)
    fastrack.save_file({"x": np.arange(3)}, "s3://bucket/a", key)
    server.ended.add("token-1")
    with pytest.raises(PermissionError, match=r"expired \(ExpiredToken\); get new ones"):
        fastrack.load_file("s3://bucket/a")
    with pytest.raises(PermissionError, match=r"expired \(ExpiredToken\); get new ones"):
        fastrack.save_file({"x": np.arange(3)}, "s3://bucket/b", key)
