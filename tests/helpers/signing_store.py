"""A file system of S3 in place of that of s3fs, without its packages: the part of it that fastrack uses.

As s3fs 2026.9: `session` is botocore's, and keeps its credentials; `connect(refresh=True)` makes another where it is
None; `sign(path, expiration)` asks no server; a file that is written sends requests by `_call_s3`, and errors are of
classes of Python, with botocore's `ClientError` as their cause. As botocore: refreshable credentials have
`_expiry_time`. Its objects are read from a `RangeServer`.
"""

from __future__ import annotations

import datetime as dt
import io
import time
from types import SimpleNamespace


class ClientError(Exception):
    """An error of botocore, with a code."""

    def __init__(self, code):
        super().__init__("secret")
        self.response = {"Error": {"Code": code, "Message": "secret"}}


def refusal(code):
    """Return an error as s3fs makes it of an answer."""
    error = {"NoSuchBucket": FileNotFoundError, "ExpiredToken": PermissionError}.get(code, OSError)("secret")
    error.__cause__ = ClientError(code)
    return error


class SigningStore:
    """The store. `ended` has the tokens that are refused with `code`; each session has one of its own."""

    protocol = ("s3", "s3a")

    def __init__(self, served):
        self.served = served
        self.session, self.storage_options, self.config_kwargs = None, {}, {"signature_version": "s3v4"}
        self.sessions, self.expirations, self.lives = 0, [], None
        self.requests, self.ended, self.code, self.content = [], set(), "ExpiredToken", b""
        self.transaction = SimpleNamespace(files=[])
        self.connect()

    def connect(self, refresh=False):
        if self.session is None:
            time.sleep(0.02 if refresh else 0)  # as a session of botocore takes; other threads use the old client
            self.sessions += 1
            self.session, self.token = SimpleNamespace(), str(self.sessions)
        end = None if self.lives is None else dt.datetime.now(dt.UTC) + self.lives
        self._s3 = SimpleNamespace(_request_signer=SimpleNamespace(_credentials=SimpleNamespace(_expiry_time=end)))

    def sign(self, path, expiration):
        self.expirations.append(expiration)
        return f"{self.served.url(path.rpartition('/')[2])}?token={self.token}"

    def invalidate_cache(self):
        """Do nothing: nothing is kept."""

    def call_s3(self, method):
        self.requests.append(method)
        if self.token in self.ended:
            raise refusal("400" if method.startswith("head") else self.code)  # an answer to HEAD has no body

    def exists(self, _path):
        self.call_s3("head_object")
        return False

    def open(self, _path, _mode, **_):
        return _Upload(self)


class _Upload(io.BytesIO):
    """A file that is written, in one request for each write."""

    autocommit, mpu = True, None

    def __init__(self, store):
        super().__init__()
        self._store = store
        self._is_whole = False

    def _call_s3(self, method):
        self._store.call_s3(method)

    def write(self, data):
        self._call_s3("upload_part")
        self._store.content += bytes(data)
        return len(data)

    def close(self):
        if not self._is_whole:
            self._is_whole = True
            self._call_s3("complete_multipart_upload")

    def discard(self):
        self._store.content, self._is_whole = b"", True
