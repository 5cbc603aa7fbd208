"""Servers that are slow, busy, cut short, changed, or lie: the right bytes come, or an error that says what failed."""

import contextlib
import http.client
import socket
import threading

import numpy as np
import pytest
from helpers.commands import invoke

import fastrack
from fastrack._remote import objects


def rows(url, key, chosen):
    with fastrack.load_file(url) as file:
        return fastrack.unseal(file["images"][chosen], key, framework="numpy")


def once(action):
    """Return a fault that happens to each range once, after the file was opened."""
    seen = set()

    def fault(handler, number):
        requested = handler.headers["Range"].split("-")[1]
        if number == 0 or requested in seen:
            return False
        seen.add(requested)
        action(handler)
        return True

    return fault


def always(action):
    def fault(handler, number):
        if number == 0:
            return False
        action(handler)
        return True

    return fault


PASSING = {
    "busy": lambda handler: handler.refuse(503),
    "too many requests": lambda handler: handler.refuse(429, Retry_After="0"),
    "cut in the body": lambda handler: handler.answer(cut=1000),
    "cut at once": lambda handler: handler.hang_up(),
    "another range": lambda handler: handler.answer(content_range="bytes 0-9/2800000", length=10, body=b"0123456789"),
    "a wrong length": lambda handler: handler.answer(length=10, body=b"0123456789"),
    "no range": lambda handler: handler.answer(content_range="bytes */*"),
    "a range outside": lambda handler: handler.answer(content_range="bytes 9-5/7"),
    "no HTTP": lambda handler: (handler.wfile.write(b"\0" * 100), handler.hang_up()),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_is_not_noticed(name, served, url, key, images):
    served.faults = once(PASSING[name])
    np.testing.assert_array_equal(rows(url, key, [30, 3, 17]), images[[30, 3, 17]])
    assert len(served.requests) > 3


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_stays_is_an_error_that_names_the_url(name, served, url, key):
    served.faults = always(PASSING[name])
    with pytest.raises(OSError, match=r"reading failed 6 times.*a\.safetensors"):
        rows(url, key, [30])


def test_a_range_is_continued_where_it_was_cut(served, url, key, images):
    served.faults = lambda handler, number: number in {1, 2} and (handler.answer(cut=100_000), True)[1]
    np.testing.assert_array_equal(rows(url, key, [30]), images[[30]])
    starts = [int(requested.removeprefix("bytes=").split("-")[0]) for _, requested in served.requests[1:]]
    assert starts[1] - starts[0] == 100_000


@pytest.mark.parametrize(
    ("status", "error"), [(404, FileNotFoundError), (403, PermissionError), (401, PermissionError), (418, OSError)]
)
def test_a_refusal_is_not_tried_again(status, error, served, url, key):
    served.faults = lambda handler, number: (handler.refuse(status), True)[1]
    with pytest.raises(error, match=r"a\.safetensors"):
        rows(url, key, [0])
    assert len(served.requests) == 1


@pytest.mark.parametrize(("status", "count"), [(401, 1), (403, 3)])
def test_a_password_that_a_server_refuses_is_sent_for_one_file_of_a_run(status, count, served, url, key, tmp_path):
    key.save(tmp_path / "owner.key")
    served.faults = lambda handler, number: (handler.refuse(status), True)[1]
    urls = [url.replace("://", "://user:word@").replace("a.", f"{name}.") for name in "abc"]
    result = invoke(["verify", *urls, "--key", str(tmp_path / "owner.key")])
    assert (result.exit_code, len(served.requests)) == (1, count)
    assert ("not tried: 2 files, as credentials were refused" in result.output) == (status == 401)


def test_a_file_that_changes_while_it_is_open_is_an_error(served, url, key, images):
    with fastrack.load_file(url) as file:
        fastrack.save_file(
            {"images": images[::-1].copy(), "labels": np.arange(40)}, served.folder / "a.safetensors", key
        )
        with pytest.raises(fastrack.FormatError, match="replaced or changed"):
            fastrack.unseal(file["images"], key, framework="numpy")
    np.testing.assert_array_equal(rows(url, key, [0]), images[[39]])


def test_a_server_that_ignores_the_condition_is_caught_by_its_entity_tag(served, url, key):
    def another(handler):
        del handler.headers["If-Match"]
        handler.answer(etag='"another"')

    served.faults = always(another)
    with fastrack.load_file(url) as file, pytest.raises(fastrack.FormatError, match="replaced or changed"):
        fastrack.unseal(file["images"][30], key, framework="numpy")


def test_a_server_without_ranges_is_refused(served, url, key):
    served.faults = lambda handler, number: (handler.answer(status=200), True)[1]
    with pytest.raises(fastrack.FormatError, match="gives ranges"):
        rows(url, key, [0])


def test_an_endless_body_is_not_read(served, url, key):
    def endless(handler):
        handler.send_response(206)
        handler.send_header("ETag", "x")
        handler.send_header("Content-Range", f"bytes 0-{objects.HEAD - 1}/{1 << 40}")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        with contextlib.suppress(OSError):  # until the client hangs up
            while True:
                handler.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")

    served.faults = lambda handler, number: (endless(handler), True)[1]
    with pytest.raises(fastrack.FormatError):
        rows(url, key, [0])


@pytest.mark.parametrize("size", [1 << 48, 10**14])
def test_a_size_that_is_a_lie_costs_nothing(size, served, url, key):
    served.faults = lambda handler, number: (
        handler.answer(content_range=f"bytes 0-{objects.HEAD - 1}/{size}"),
        True,
    )[1]
    with pytest.raises(fastrack.FormatError, match="a file of up to"):  # before an index is made
        rows(url, key, [0])


def test_an_empty_file_is_no_sealed_file(served):
    (served.folder / "empty").touch()
    with pytest.raises(fastrack.FormatError):
        fastrack.load_file(served.url("empty"))


@pytest.mark.slow
def test_a_server_that_trickles_is_given_up(served, url, key, limited):
    limited(answer_time=0.02, attempts=2)

    def trickle(handler):
        stop = threading.Event()
        write = handler.wfile.write

        def slow(data):
            for byte in data[:100]:
                write(bytes([byte]))
                handler.wfile.flush()
                stop.wait(0.01)

        handler.answer(body=b"")
        slow(bytes(100))
        handler.hang_up()

    served.faults = always(trickle)
    with pytest.raises(OSError, match="reading failed 2 times"):
        rows(url, key, [30])


def test_nothing_listens():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(OSError, match="ConnectionRefused"):
            fastrack.load_file(f"http://127.0.0.1:{port}/a.safetensors")


def test_an_error_shows_neither_password_nor_query(served, url):
    secret = url.replace("//", "//user:hunter2@") + "?signature=hunter3#hunter4"
    served.faults = lambda handler, number: (handler.refuse(404), True)[1]
    with pytest.raises(FileNotFoundError) as caught:
        fastrack.load_file(secret)
    assert "hunter" not in str(caught.value)
    served.faults = lambda handler, number: False
    file = fastrack.load_file(secret)
    assert "hunter" not in f"{file} {file.path} {file.path!r} {file['images']}"


def test_the_password_of_a_url_is_sent_to_its_server_alone(served, url):
    seen = []
    served.faults = lambda handler, number: bool(seen.append(handler.headers.get("Authorization")))
    fastrack.load_file(url.replace("//", "//user:hunter2@"))
    assert seen == ["Basic dXNlcjpodW50ZXIy"]


def test_a_redirection_is_followed(served, url, key, images):
    def moved(handler, _number):
        if "old" in handler.path:
            handler.refuse(302, Location=handler.path.replace("old", "a"))
            return True
        return False

    served.faults = moved
    np.testing.assert_array_equal(rows(url.replace("/a.", "/old."), key, [30, 2]), images[[30, 2]])


def test_a_circle_of_redirections_ends(served, url):
    served.faults = lambda handler, number: (handler.refuse(302, Location=handler.path), True)[1]
    with pytest.raises(fastrack.FormatError, match="redirections"):
        fastrack.load_file(url)
    assert http.client.FOUND
