"""Codes in the answers of stores: what is said for each, and signed URLs and sessions that are renewed for some."""

import builtins
import datetime as dt
import pickle
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from helpers.signing_store import SigningStore, refusal
from stores import list_below

import fastrack
from fastrack._remote import codes, filesystem, http
from fastrack._util.locations import Url

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
XML = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{}</Code><Message>{}</Message></Error>"
JSON = '{{"error": {{"errors": [{{"domain": "global", "reason": "{}", "message": "{}"}}], "code": 1}}}}'


@pytest.fixture
def place(served):
    """The URL of a file that is not sealed, of which ranges are read."""
    served.write("a.safetensors", 1000)
    return served.url("a.safetensors")


def refuse(status, body, **headers):
    """Return a fault that answers all requests with a refusal."""

    def fault(handler, _number):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True

    return fault


def failure(served, url, fault):
    """Return the error of opening a file of a server whose answers `fault` gives."""
    served.faults = fault
    with pytest.raises((OSError, fastrack.FormatError)) as caught:
        fastrack.load_file(url)
    return caught.value


def rows():
    """Return codes, text and class of each row of the table in the documentation."""
    lines = PAGE.read_text(encoding="utf-8").partition("### What is said for which code")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in lines.splitlines() if line.startswith("| ")]
    return [
        (re.findall(r"`(\w+)`", told), re.findall(r"\b\d{3}\b", told), said, name.strip("`"))
        for told, said, name in cells[1:]
    ]


@pytest.mark.skipif(not PAGE.exists(), reason="the tests run without the documentation")
def test_each_code_of_the_table_is_explained_as_the_table_says(served, place, limited):
    limited(attempts=1)
    told = set()
    for words, numbers, said, name in rows():
        failed, advice = said.removeprefix("after six tries: ").partition("; ")[::2]
        answers = {word: refuse(418, XML.format(word, "secret").encode()) for word in words}
        answers |= {number: refuse(int(number), b"secret") for number in numbers}
        for code, fault in answers.items():
            told.add(code)
            error = failure(served, place, fault)
            assert f"{failed} ({code})" in str(error)
            assert advice in str(error)
            assert type(error).__name__ == name
            assert "a.safetensors" in str(error)
            assert "secret" not in str(error)
    # The others are classes of errors, which no server sends, and a redirection of which S3 gives the place.
    assert {code for code in codes.KNOWN if not code.endswith(("Error", "NotFound", "Required"))} <= told
    assert {code for code in codes.KNOWN if code not in told} == {
        "FileExistsError", "FileNotFoundError", "NotImplementedError", "PermissionError",  # of Python
        "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError",
        "MetadataRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError",  # of botocore
        "DefaultCredentialsError", "RefreshError", "ClientAuthenticationError", "CredentialUnavailableError",
    }  # fmt: skip


FORMS = {
    "XML of S3": refuse(403, XML.format("InvalidObjectState", "secret").encode()),
    "spaces": refuse(403, b"<Error>\n  <Code>\n    InvalidObjectState </Code>"),
    "JSON of Google's store": refuse(403, JSON.format("InvalidObjectState", "secret").encode()),
    "the header of Azure": refuse(403, b"", x_ms_error_code="InvalidObjectState"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_code_is_found_in_what_each_store_answers(name, served, place):
    assert "archived (InvalidObjectState); restore it" in str(failure(served, place, FORMS[name]))
    assert len(served.requests) == 1


def test_codes_decide_which_refusals_pass(served, place):
    failure(served, place, refuse(400, XML.format("RequestTimeout", "").encode()))
    assert len(served.requests) == 6
    served.requests.clear()
    failure(served, place, refuse(503, XML.format("NoSuchBucket", "").encode()))
    assert len(served.requests) == 1


HOSTILE = {
    "a value": XML.format("hunter2", "hunter3"),
    "letters": XML.format("hunter", "hunter"),
    "letters in a header of JSON": JSON.format("hunterHunter", "hunter"),
    "an entity": "<!DOCTYPE a [<!ENTITY b 'hunter'>]><Error><Code>&b;</Code></Error>",
    "entities": "<!DOCTYPE a [<!ENTITY b '" + "x" * 9999 + "'>]><Error><Code>" + "&b;" * 9999 + "</Code></Error>",
    "behind much": " " * 5000 + XML.format("ExpiredToken", "hunter"),
    "markup": "<Code>" * 9999,
    "other bytes": "\x00\x80\xff" * 9999,
    "deep JSON": '{"error": ' * 9999,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_else_that_a_hostile_server_says_is_repeated(name, served, place):
    body = HOSTILE[name].encode("latin-1")
    for status in (400, 403, 599):
        error = failure(served, place.replace("//", "//user:hunter@"), refuse(status, body, x_ms_error_code="hunter"))
        assert "hunter" not in f"{error}{error!r}{error.args}"
        assert str(status) in str(error)
        assert "expired (" not in str(error)
        assert isinstance(error, PermissionError) == (status == 403)


@pytest.mark.slow
def test_a_refusal_without_an_end_is_read_in_part_and_not_for_long(served, place, limited):
    sent = 0

    def flood(handler, _number):
        nonlocal sent
        handler.wfile.write(b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while sent < 1 << 28:
                sent += handler.wfile.write(b"1000\r\n" + bytes(4096) + b"\r\n")
        except OSError:  # the client hangs up
            return True
        return True

    assert "access (403)" in str(failure(served, place, flood))
    assert sent < 1 << 26  # with what the buffers of the connection hold
    limited(reason_time=0.4)
    stop = threading.Event()

    def drip(handler, _number):
        handler.wfile.write(b"HTTP/1.1 403 No\r\nContent-Length: 4000\r\n\r\n<Code>Slow")
        handler.wfile.flush()
        while not stop.wait(0.01):
            try:
                handler.wfile.write(b"x")
                handler.wfile.flush()
            except OSError:
                break
        return True

    def stall(handler, _number):
        handler.wfile.write(b"HTTP/1.1 403 No\r\nConnection: close\r\n\r\n")  # as many stores end a refusal
        handler.wfile.flush()
        stop.wait(20)
        return True

    try:
        for fault in (drip, stall):
            begun = time.monotonic()
            assert "access (403)" in str(failure(served, place, fault))
            assert time.monotonic() - begun < 15  # of the 30 seconds that an answer may take
    finally:
        stop.set()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirection_without_a_place_is_an_answer(status, served, place):
    error = failure(served, place, refuse(status, XML.format("PermanentRedirect", "").encode()))
    assert "region, or at another address (PermanentRedirect); set AWS_DEFAULT_REGION" in str(error)
    assert len(served.requests) == 1


@pytest.mark.parametrize("coding", ["gzip", "br", "hunter"])
def test_an_object_with_a_content_encoding_is_refused_at_once(coding, served, url):
    def coded(handler, _number):
        handler.send_header_of = handler.send_header
        handler.send_response = lambda status: (
            type(handler).send_response(handler, status),
            handler.send_header_of("Content-Encoding", coding),
        )
        return False

    error = failure(served, url, coded)
    assert "expected an object without Content-Encoding" in str(error)
    assert "hunter" not in str(error)
    assert len(served.requests) == 1
    coding = "aws-chunked"  # which some stores keep of an upload, of bytes as they are
    served.faults = coded
    assert fastrack.load_file(url)


def judge(ended, code):
    """Return a fault that refuses URLs which were signed with a token that has ended."""

    def fault(handler, number):
        token = handler.path.partition("token=")[2]
        return token in ended and refuse(400, XML.format(code, "It has expired.").encode())(handler, number)

    return fault


class Signer:
    """Signs URLs with the token of its session, for as long as its credentials live, as a store of S3 does."""

    def __init__(self, url, lives=3600.0):
        self.url, self.lives, self.token, self.ended = url, lives, 1, []
        self.lock = threading.Lock()

    def sign(self, ended):
        with self.lock:
            if ended is not None:
                self.ended.append(ended)
                self.token = max(self.token, ended + 1)
            return f"{self.url}?token={self.token}", self.lives, self.token


def opened(signer):
    return http.HttpObject(Url("s3://bucket/a.safetensors"), signer.sign)


ABOUT_SIGNATURES = {
    "ExpiredToken": 400, "TokenRefreshRequired": 400, "InvalidToken": 400, "RequestExpired": 400, "AccessDenied": 403,
    "SignatureDoesNotMatch": 403, "InvalidAccessKeyId": 403, "": 400,
}  # fmt: skip


@pytest.mark.parametrize("code", ABOUT_SIGNATURES)
def test_a_url_is_signed_once_more_after_an_answer_about_its_signature(code, served, place):
    signer = Signer(place)
    remote = opened(signer)
    served.requests.clear()
    served.faults = lambda handler, number: (
        number == 0 and refuse(ABOUT_SIGNATURES[code], XML.format(code, "").encode() if code else b"")(handler, number)
    )
    remote.read(0, 10, lambda *_: None)
    assert len(served.requests) == 2
    assert signer.ended == ([1] if code in {*codes.ENDED, ""} else [])  # others need no new session
    served.requests.clear()
    served.faults = refuse(ABOUT_SIGNATURES[code], XML.format(code, "").encode())
    with pytest.raises(OSError, match=code or "without a reason"):
        remote.read(0, 10, lambda *_: None)
    assert len(served.requests) == 2


@pytest.mark.parametrize("code", ["InvalidObjectState", "RequestTimeTooSkewed", "NoSuchKey", "PermanentRedirect"])
def test_a_url_is_not_signed_again_for_what_a_signature_does_not_change(code, served, place):
    remote = opened(Signer(place))
    served.requests.clear()
    served.faults = refuse(403, XML.format(code, "").encode())
    with pytest.raises(OSError, match=code):
        remote.read(0, 10, lambda *_: None)
    assert len(served.requests) == 1


@pytest.mark.parametrize(("lives", "signatures"), [(3600.0, 1), (0.0, 4), (-60.0, 4)])
def test_a_url_is_used_no_longer_than_its_credentials_live(lives, signatures, served, place):
    signer, signed = Signer(place, lives), []
    remote = http.HttpObject(Url("s3://bucket/a"), lambda ended: (signed.append(ended), signer.sign(ended))[1])
    for _ in range(3):
        remote.read(0, 10, lambda *_: None)
    assert len(served.requests) == 4
    assert signed in ([None] * signatures, [None] * (signatures + 1))


@pytest.fixture
def store(served, monkeypatch):
    """File system that fsspec finds for ``s3://``."""
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    made = SigningStore(served)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (made, url.partition("://")[2]))
    return made


@pytest.mark.parametrize("code", ["ExpiredToken", "TokenRefreshRequired"])
@pytest.mark.usefixtures("url")
def test_reading_goes_on_when_a_token_ends_twice(code, served, store, key, images):
    ended = set()
    served.faults = judge(ended, code)
    with fastrack.load_file("s3://bucket/a.safetensors") as file:
        for chosen in ([30], [3, 17, 20, 22, 25, 27, 34, 36], [5, 7, 9, 11, 13, 15, 39]):
            np.testing.assert_array_equal(
                fastrack.unseal(file["images"][chosen], key, framework="numpy"), images[chosen]
            )
            ended.add(store.token)
    assert store.sessions == 3


@pytest.mark.usefixtures("place")
def test_threads_whose_token_ends_wait_for_one_new_session(served, store):
    url, ended = Url("s3://bucket/a.safetensors"), set()
    served.faults = judge(ended, "ExpiredToken")
    remote = http.HttpObject(url, filesystem._Store(url).sign)
    ended.add(store.token)
    with ThreadPoolExecutor(16) as threads:
        for done in [threads.submit(remote.read, 0, 10, lambda *_: None) for _ in range(16)]:
            done.result()
    assert store.sessions == 2


@pytest.mark.usefixtures("url")
def test_a_session_of_the_caller_is_kept_and_the_error_says_what_ended(served, store):
    store.storage_options["session"] = store.session
    served.faults = refuse(400, XML.format("ExpiredToken", "").encode())
    with pytest.raises(PermissionError, match=r"expired \(ExpiredToken\); get new ones") as caught:
        fastrack.load_file("s3://bucket/a.safetensors")
    assert (store.sessions, len(served.requests)) == (1, 2)
    assert caught.value.is_refusal  # which ends a command on many files


@pytest.mark.parametrize(("minutes", "signed_for"), [(None, 3600), (600, 3600), (20, 1199), (0.5, 29), (-5, 1)])
@pytest.mark.usefixtures("url")
def test_a_url_of_s3_is_signed_for_no_longer_than_its_credentials_live(minutes, signed_for, store):
    store.lives = None if minutes is None else dt.timedelta(minutes=minutes)
    store.connect(refresh=True)
    with fastrack.load_file("s3://bucket/a.safetensors"):
        assert signed_for - 5 <= store.expirations[-1] <= signed_for
    _, used_for, session = filesystem._Store(Url("s3://bucket/a.safetensors")).sign(None)
    assert used_for <= (1800.0 if minutes is None else min(1800.0, minutes * 60 - 60))  # the last minute is not used
    assert session is store.session


def test_an_upload_goes_on_when_its_token_ends_twice(store, key, monkeypatch):
    ask = store.call_s3

    def ask_and_end(method):
        ask(method)
        if store.sessions < 3 or method == "head_object":
            store.ended.add(store.token)

    monkeypatch.setattr(store, "call_s3", ask_and_end)
    fastrack.save_file({"x": np.arange(9), "y": np.arange(99)}, "s3://bucket/a.safetensors", key)
    assert store.sessions == 3
    Path("a.safetensors").write_bytes(store.content)
    assert fastrack.unseal(fastrack.load_file("a.safetensors")["x"], key, framework="numpy").tolist() == [*range(9)]
    np.save("x.npy", np.arange(3))
    for _ in range(2):  # each asks by HEAD for an object of that name
        fastrack.seal_file("x.npy", "s3://bucket/b", key, overwrite=False)
    assert store.sessions == 5


SAID = {
    "NoSuchBucket": (FileNotFoundError, "no such bucket (NoSuchBucket); check its name"),
    "RequestTimeTooSkewed": (OSError, "clock"),
    "SlowDown": (OSError, "writing failed: the server is busy (SlowDown); check the connection and the server"),
    "InvalidToken": (PermissionError, "expired (InvalidToken); get new ones"),
    "NoSuchUpload": (OSError, "no longer there"),
    "InvalidArgument": (OSError, "writing failed: OSError (InvalidArgument); check the connection"),
    "301": (OSError, "another region"),
}


@pytest.mark.parametrize("code", SAID)
def test_codes_are_explained_when_an_object_is_written(code, store, key):
    store.ended, store.code = set(map(str, range(9))), code
    kind, said = SAID[code]
    with pytest.raises(OSError) as caught:  # noqa: PT011 - compared below
        fastrack.save_file({"x": np.arange(3)}, "s3://bucket/a.safetensors", key)
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)
    assert store.content == b""


@pytest.mark.parametrize("code", ["NoSuchBucket", "ContainerNotFound", "NoSuchKey"])
@pytest.mark.parametrize("url", ["s3://bucket/folder/", "s3://bucket/train-*.safetensors"])
def test_a_bucket_that_is_not_there_is_no_empty_folder(code, url, store, monkeypatch):
    def fail(*_, **__):
        error = FileNotFoundError("secret")
        error.__cause__ = refusal(code).__cause__
        raise error

    for operation in ("ls", "find"):
        monkeypatch.setattr(store, operation, fail, raising=False)
    if code == "NoSuchKey":
        assert list_below(url) == []
        return
    with pytest.raises(FileNotFoundError, match=rf"no such bucket \({code}\)") as caught:
        fastrack.SealedDataset(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"])
def test_missing_credentials_are_said_and_not_to_try_again(name, store, key, monkeypatch):
    def fail(*_, **__):
        raise type(name, (Exception,), {})("secret")

    for operation in ("open", "sign"):
        monkeypatch.setattr(store, operation, fail)
    uses = (
        lambda: fastrack.save_file({"x": np.arange(3)}, "s3://bucket/a", key),
        lambda: fastrack.load_file("s3://b/a"),
    )
    for use in uses:
        with pytest.raises(PermissionError, match=rf"no credentials were found \({name}\); set them") as caught:
            use()
        assert "try again" not in str(caught.value).lower()


class StorageErrorCode(str):
    """A code of Azure's package, which is a text of a class of its own."""

    __slots__ = ()

    def __str__(self):
        return "StorageErrorCode.x"


ERRORS = {
    "s3fs": (refusal("InvalidObjectState"), "InvalidObjectState"),
    "a number of s3fs": (refusal("301"), "301"),
    "Azure": (
        type("HttpResponseError", (Exception,), {"error_code": StorageErrorCode("BlobArchived")})(),
        "BlobArchived",
    ),
    "a number of gcsfs": (type("HttpError", (Exception,), {"code": 401})("Invalid Credentials, 401"), "401"),
    "a refusal of gcsfs": (OSError("Forbidden: https://host/secret\nmessage"), "403"),
    "a class of google.auth": (type("DefaultCredentialsError", (Exception,), {})(), "DefaultCredentialsError"),
    "a response of Hugging Face": (
        type("HfHubHTTPError", (OSError,), {"response": SimpleNamespace(status_code=401, text="ExpiredToken")})(),
        "401",
    ),
    "aiohttp": (type("ClientResponseError", (Exception,), {"status": 429})(), "429"),
    "none": (ValueError("ExpiredToken"), ""),
    "a number that is no status": (type("E", (Exception,), {"code": 7, "status": True, "response": None})(), ""),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_code_of_an_error_of_each_package_is_found(name):
    error, code = ERRORS[name]
    assert codes.find_code(error) == code


def test_errors_of_codes_survive_a_worker_and_show_no_class_of_python():
    error = codes.explain("ExpiredToken", Url("s3://user:secret@bucket/a"))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (PermissionError, str(error))
    for code in codes.KNOWN:
        assert ("(" in str(codes.explain(code, Url("s3://bucket/a")))) == (not hasattr(builtins, code))


INFOS = {
    "Google's store": {"contentEncoding": "gzip"},
    "Azure": {"content_settings": SimpleNamespace(content_encoding="gzip")},
}


@pytest.mark.parametrize("name", INFOS)
def test_an_object_that_the_package_of_a_store_would_decode_is_refused_at_once(name, key, images, monkeypatch):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    from fsspec.implementations.memory import MemoryFileSystem

    fastrack.save_file({"images": images}, "memory://bucket/coded", key)
    told, info = [], MemoryFileSystem.info

    def coded(self, path, **options):
        told.append(path)
        return {**info(self, path, **options), **INFOS[name]}

    monkeypatch.setattr(MemoryFileSystem, "info", coded)
    with pytest.raises(fastrack.FormatError, match="without Content-Encoding"):
        fastrack.load_file("memory://bucket/coded")
    assert len(told) == 1


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("0.4.2", True), ("2024.12.0", True), ("2025.3.2", True), ("2025.5.0", False), ("2025.10.0", False),
     ("2026.9.0", False), ("0+unknown", False)],
)  # fmt: skip
@pytest.mark.usefixtures("url")
def test_an_s3fs_that_is_too_old_is_named_with_what_installs_another(version, is_old, store, key, monkeypatch):
    module = ModuleType("s3fs")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "s3fs", module)
    if not is_old:
        assert fastrack.load_file("s3://bucket/a.safetensors")
        return
    uses = (
        lambda: fastrack.load_file("s3://bucket/a.safetensors"),
        lambda: fastrack.save_file({"x": np.arange(3)}, "s3://bucket/b", key),
        lambda: list_below("s3://bucket/a/"),
    )
    for use in uses:
        with pytest.raises(ImportError) as caught:
            use()
        assert f"expected s3fs 2025.5 or later, got {'.'.join(version.split('.')[:2])}:" in str(caught.value)
        assert "pip install 'fastrack-io[remote]'" in str(caught.value)
    assert store.expirations == []


def test_the_s3fs_that_is_demanded_is_that_of_the_extra():
    project = PAGE.parents[1] / "pyproject.toml"
    if not project.exists():
        pytest.skip("the tests run outside a checkout")
    assert 'remote = ["fsspec>=2025.5", "s3fs>=2025.5"]' in project.read_text(encoding="utf-8")


def test_another_file_system_that_is_registered_for_s3_is_read(key, images, monkeypatch):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    from fsspec.implementations.memory import MemoryFileSystem

    fastrack.save_file({"images": images}, "memory://bucket/other", key)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda _url, **_: (MemoryFileSystem(), "/bucket/other"))
    with fastrack.load_file("s3://bucket/other") as file:  # it signs nothing
        np.testing.assert_array_equal(fastrack.unseal(file["images"][[3]], key, framework="numpy"), images[[3]])


def test_a_store_that_lacks_credentials_is_not_called_an_unknown_url(monkeypatch):
    pytest.importorskip("fsspec", reason="fsspec is not installed")

    def fail(*_, **__):  # as adlfs does without any
        raise ValueError("secret")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(fastrack.FormatError, match="and credentials if it needs them") as caught:
        fastrack.load_file("az://container/a.safetensors")
    assert "secret" not in str(caught.value)
