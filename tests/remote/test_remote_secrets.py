"""Errors of every kind, in none of which the password, the query or the fragment of a URL is."""

import contextlib
import logging
import ssl
import traceback
from types import SimpleNamespace

import numpy as np
import pytest

import fastrack
from fastrack._remote import http, objects
from fastrack._util.locations import Url, locate

SECRET = "hunter"  # with which all that is secret begins
USER, QUERY = "hunter1:hunter2", "X-Amz-Signature=hunter3&b=1#hunter4"


def signed(url):
    return f"{url.replace('//', f'//{USER}@')}?{QUERY}"


def every(action):
    return lambda handler, number: (action(handler), True)[1]


def after_opening(action):
    return lambda handler, number: number > 0 and (action(handler), True)[1]


def say(text):
    """Answer with a text in which `{secret}` stands for what the client asked for."""

    def answer(handler):
        handler.wfile.write(text.replace("{secret}", f"{handler.path} {USER}").encode("latin-1"))
        handler.wfile.flush()
        handler.hang_up()

    return answer


ANSWERS = {
    "no HTTP": say("{secret}\r\n\r\n"),
    "a status that is no number": say("HTTP/1.1 {secret}\r\n\r\n"),
    "a refusal": say("HTTP/1.1 403 {secret}\r\nContent-Length: 0\r\n\r\n"),
    "no such file": say("HTTP/1.1 404 {secret}\r\nContent-Length: 0\r\n\r\n"),
    "busy": say("HTTP/1.1 503 {secret}\r\nRetry-After: {secret}\r\nContent-Length: 0\r\n\r\n"),
    "an unknown status": say("HTTP/1.1 599 {secret}\r\nContent-Length: 0\r\n\r\n"),
    "a teapot": say("HTTP/1.1 418 {secret}\r\nContent-Length: 0\r\n\r\n"),
    "the whole file": say("HTTP/1.1 200 {secret}\r\nContent-Length: 9\r\n\r\n{secret}"),
    "a range": say("HTTP/1.1 206 OK\r\nContent-Range: {secret}\r\nContent-Length: 9\r\n\r\n{secret}"),
    "a length": say("HTTP/1.1 206 OK\r\nContent-Range: bytes 0-1/9\r\nContent-Length: {secret}\r\n\r\n"),
    "a coding": say(
        "HTTP/1.1 206 OK\r\nContent-Range: bytes 0-1/2\r\nContent-Encoding: {secret}\r\nContent-Length: 2\r\n\r\nab"
    ),
    "a chunk": say(
        "HTTP/1.1 206 OK\r\nContent-Range: bytes 0-8/9\r\nTransfer-Encoding: chunked\r\n\r\n{secret}\r\n{secret}"
    ),
    "a long line": say("HTTP/1.1 206 OK\r\nX: {secret}" + "x" * 70000 + "\r\n\r\n"),
    "many lines": say("HTTP/1.1 206 OK\r\n" + "X: {secret}\r\n" * 200 + "\r\n"),
    "moved to a file": say("HTTP/1.1 302 OK\r\nLocation: file:///{secret}\r\nContent-Length: 0\r\n\r\n"),
    "moved to a path with spaces": say("HTTP/1.1 302 OK\r\nLocation: /{secret}\r\nContent-Length: 0\r\n\r\n"),
    "moved to no port": say("HTTP/1.1 302 OK\r\nLocation: http://host:hunter9/\r\nContent-Length: 0\r\n\r\n"),
    "moved to no host": say("HTTP/1.1 302 OK\r\nLocation: http://[hunter9/\r\nContent-Length: 0\r\n\r\n"),
    "moved to a scheme": say("HTTP/1.1 302 OK\r\nLocation: hunter9://host/\r\nContent-Length: 0\r\n\r\n"),
    "moved beyond ASCII": say("HTTP/1.1 302 OK\r\nLocation: http://h\xe9/hunter9\r\nContent-Length: 0\r\n\r\n"),
    "moved in circles": lambda handler: handler.refuse(302, Location=handler.path),
    "hung up": lambda handler: handler.hang_up(),
    "changed": lambda handler: handler.refuse(412),
    "cut": lambda handler: handler.answer(cut=10),
}  # fmt: skip

URLS = {
    "a space": "http://127.0.0.1:1/a b?sig=hunter1",
    "a line": "http://127.0.0.1:1/a?sig=hunter1\r\nX: hunter2",
    "a control character": "http://127.0.0.1:1/a?sig=hunter1\x01",
    "beyond ASCII": "http://127.0.0.1:1/a?sig=hunter1\xe9",
    "beyond ASCII in the host": "http://hunter1:hunter2@\u2100.example/a?sig=hunter3",
    "a lone surrogate": "http://127.0.0.1:1/a?sig=hunter1\udc80",
    "a port that is none": "http://hunter1:hunter2@host:port/a?sig=hunter3",
    "a slash in the password": "http://hunter1:hun/hunter2@127.0.0.1/a?sig=hunter3",
    "a bracket": "http://hunter1:hunter2@[::1/a?sig=hunter3",
    "no host": "http:///a?sig=hunter1",
    "nothing listens": "http://hunter1:hunter2@127.0.0.1:1/a?sig=hunter3",
    "no such host": "http://hunter1:hunter2@nothing.invalid/a?sig=hunter3",
    "no TLS": "https://hunter1:hunter2@127.0.0.1:1/a?sig=hunter3",
    "a scheme that nothing knows": "nonsense://hunter1:hunter2@host/a?sig=hunter3",
    "a file of another machine": "file://hunter1:hunter2@host/a?sig=hunter3",
}  # fmt: skip


def told(error):
    """Return all that can be read of an error, of its chain and of its notes."""
    text, seen = "".join(traceback.format_exception(error)), set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text += f"{error}{error!r}{error.args}{getattr(error, '__notes__', '')}{getattr(error, 'filename', '')}"
        text += "".join(traceback.format_exception(error))
        error = error.__cause__ or error.__context__
    return text


def check(use, caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises((OSError, ValueError, ImportError)) as caught:
        use()
    text = told(caught.value)
    assert SECRET not in text, text
    assert SECRET not in caplog.text
    return text


@pytest.mark.parametrize("when", [every, after_opening])
@pytest.mark.parametrize("name", ANSWERS)
def test_no_answer_of_a_server_brings_a_secret_into_an_error(name, when, served, url, key, caplog):
    served.faults = when(ANSWERS[name])

    def use():
        with fastrack.load_file(signed(url)) as file:
            fastrack.unseal(file["images"][30], key)

    assert "a.safetensors" in check(use, caplog)


@pytest.mark.parametrize("name", URLS)
def test_no_url_that_cannot_be_asked_for_is_repeated(name, caplog):
    check(lambda: fastrack.load_file(URLS[name]), caplog)
    with contextlib.suppress(ValueError):
        assert SECRET not in f"{locate(URLS[name])} {locate(URLS[name])!r}"


@pytest.mark.parametrize(
    "proxy", ["http://hunter1:hunter2@127.0.0.1:hunter", "http://hunter1:hunter2@127.0.0.1:1", "["]
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_is_not_repeated(proxy, scheme, monkeypatch, caplog):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.setenv("no_proxy", "")
    check(lambda: fastrack.load_file(signed(f"{scheme}://example.invalid/a")), caplog)


def test_what_a_proxy_answers_is_told_by_its_number(served, monkeypatch, caplog):
    def refuse(handler):
        handler.send_error(407, "hunter9")

    monkeypatch.setattr("helpers.range_server._Handler.do_CONNECT", refuse, raising=False)
    monkeypatch.setenv("https_proxy", served.url("").replace("//", f"//{USER}@").rstrip("/"))
    monkeypatch.setenv("no_proxy", "")
    text = check(lambda: fastrack.load_file(signed("https://example.invalid/a")), caplog)
    assert "407" in text


@pytest.mark.parametrize("operation", ["info", "cat_file", "exists", "open", "sign"])
@pytest.mark.parametrize(
    "error", [OSError, ValueError, KeyError, PermissionError, FileNotFoundError, NotImplementedError, FileExistsError]
)
def test_the_texts_of_other_libraries_are_left_out(operation, error, key, images, monkeypatch, limited, caplog):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    from fsspec.implementations.memory import MemoryFileSystem

    url = "memory://bucket/secret-test.safetensors"
    fastrack.save_file({"images": images}, url, key)
    store = MemoryFileSystem()

    def fail(*_args, **_options):
        raise error(signed("https://host/a"))

    np.save("x.npy", images)

    def use():
        monkeypatch.setattr(store, operation, fail)
        if operation in {"exists", "open"}:
            fastrack.seal_file("x.npy", url, key, overwrite=operation == "open")
        elif operation == "sign":
            http.HttpObject(Url(url), store.sign)
        else:
            fastrack.unseal(fastrack.load_file(url)["images"], key)

    limited(attempts=2)
    if operation == "sign":
        from fastrack._remote.filesystem import call_store

        fails = SimpleNamespace(sign=fail)
        check(lambda: http.HttpObject(Url(url), lambda _: call_store(Url(url), fails, "sign")), caplog)
    else:
        assert "memory://bucket/secret-test.safetensors" in check(use, caplog)


@pytest.mark.parametrize("error", [TypeError, ImportError, RuntimeError])
def test_a_store_that_cannot_be_opened_is_explained_in_own_words(error, monkeypatch, caplog):
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

    def fail(*_args, **_options):
        raise error(f"token={USER}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    assert "s3://bucket/a" in check(lambda: fastrack.load_file(signed("s3://bucket/a")), caplog)


def test_what_is_told_of_an_error_is_its_class_and_its_number_or_code():
    class ClientError(Exception):
        response = {"Error": {"Code": "SlowDown", "Message": "hunter1"}}  # noqa: RUF012 - as in botocore

    assert objects.error_code(ClientError("hunter2")) == "ClientError (SlowDown)"
    ClientError.response = {"Error": {"Code": "hunter1" * 3}}
    assert objects.error_code(ClientError("hunter2")) == "ClientError"
    ClientError.response = None
    assert objects.error_code(ClientError("hunter2")) == "ClientError"
    assert objects.error_code(ConnectionResetError(104, "hunter1")) == "ConnectionResetError (Connection reset by peer)"
    assert objects.error_code(OSError("hunter1")) == "OSError"
    assert SECRET not in objects.error_code(ssl.SSLError(1, "hunter1"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(ssl.SSLError) as caught:
        context.load_verify_locations(cadata=b"hunter1")
    assert SECRET not in objects.error_code(caught.value)
