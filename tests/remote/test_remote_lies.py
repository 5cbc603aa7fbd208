"""A server that lies in every header and body: the right rows come, or an error of a documented type, soon."""

import contextlib
import gzip
import threading

import numpy as np
import pytest
from helpers.range_server import RangeServer, etag_of

import fastrack
from fastrack._remote import retries

MIB = 1 << 20


class Answer:
    """Honest answer of a server, to be changed: a status line, lines of headers, and a body."""

    def __init__(self, handler):
        self.handler = handler
        path = handler.server_state.folder / "a.safetensors"
        content = path.read_bytes()
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        last = min(last, len(content) - 1)
        self.first, self.last, self.size = first, last, len(content)
        self.status = "206 OK"
        self.body = content[first : last + 1]
        self.headers = {
            "ETag": etag_of(path),
            "Content-Range": f"bytes {first}-{last}/{self.size}",
            "Content-Length": str(len(self.body)),
        }
        self.extra = b""

    def send(self, write):
        lines = [f"HTTP/1.1 {self.status}", *(f"{name}: {value}" for name, value in self.headers.items() if value)]
        write("\r\n".join(lines).encode("latin-1") + b"\r\n" + self.extra + b"\r\n" + self.body)


def header(name, value):
    def change(answer):
        answer.headers[name] = value(answer) if callable(value) else value

    return change


def status(value):
    return lambda answer: setattr(answer, "status", value)


def both(*changes):
    return lambda answer: [change(answer) for change in changes]


def extra(lines):
    return lambda answer: setattr(answer, "extra", lines)


def chunked(body):
    """Send a body in chunks, as `body` makes it of the right one."""

    def change(answer):
        answer.headers |= {"Content-Length": None, "Transfer-Encoding": "chunked"}
        answer.body = body(answer.body)

    return change


def length_of(body):
    """Send another body, of the length that the headers say."""

    def change(answer):
        answer.body = body(answer.body)
        answer.headers["Content-Length"] = str(len(answer.body))

    return change


def moved(location):
    return both(status("302 Found"), header("Location", location), length_of(lambda body: b""))


LIES = {
    "no Content-Range": header("Content-Range", None),
    "two Content-Ranges": extra(b"Content-Range: bytes 0-1/2\r\n"),
    "a Content-Range of no unit": header("Content-Range", lambda answer: f"{answer.first}-{answer.last}/{answer.size}"),
    "a Content-Range without size": header("Content-Range", lambda answer: f"bytes {answer.first}-{answer.last}/*"),
    "a Content-Range of another place": header(
        "Content-Range", lambda answer: f"bytes {answer.first + 1}-{answer.last + 1}/{answer.size + 1}"
    ),
    "a Content-Range that is short": header("Content-Range", lambda answer: f"bytes {answer.first}-1/{answer.size}"),
    "a negative Content-Range": header("Content-Range", "bytes -5--1/9"),
    "a Content-Range of other digits": header("Content-Range", "bytes \xb2-\xb3/\xb9"),
    "a size of 10**15": header("Content-Range", lambda answer: f"bytes {answer.first}-{answer.last}/{10**15 - 1}"),
    "a size of 10**40": header("Content-Range", lambda answer: f"bytes {answer.first}-{answer.last}/{10**40}"),
    "a size that grew": header("Content-Range", lambda answer: f"bytes {answer.first}-{answer.last}/{answer.size + 1}"),
    "no Content-Length": header("Content-Length", None),
    "two Content-Lengths": extra(b"Content-Length: 3\r\n"),
    "a Content-Length that is too short": header("Content-Length", "5"),
    "a Content-Length that is too long": header("Content-Length", lambda answer: str(len(answer.body) + 100)),
    "a negative Content-Length": header("Content-Length", "-5"),
    "a Content-Length of 10**30": header("Content-Length", str(10**30)),
    "a Content-Length that is no number": header("Content-Length", "all"),
    "no ETag": header("ETag", None),
    "an empty ETag": header("ETag", '""'),
    "a weak ETag": header("ETag", 'W/"1"'),
    "another ETag": header("ETag", '"other"'),
    "a long ETag": header("ETag", '"' + "x" * 60_000 + '"'),
    "an ETag on several lines": header("ETag", '"a\r\n Range: bytes=0-0\r\n b"'),
    "an ETag beyond ASCII": header("ETag", '"\xe9\xff"'),
    "a body of other bytes": length_of(lambda body: bytes(len(body))),
    "a body that is cut": lambda answer: setattr(answer, "body", answer.body[:100]),
    "a body that goes on": lambda answer: setattr(answer, "body", answer.body + b"HTTP/1.1 206 OK\r\n\r\n" * 100),
    "another answer behind": lambda answer: setattr(
        answer, "body", answer.body + f"HTTP/1.1 206 OK\r\nContent-Length: {1 << 18}\r\n\r\n".encode() + bytes(1 << 18)
    ),
    "gzip that is said": both(length_of(gzip.compress), header("Content-Encoding", "gzip")),
    "gzip that is not said": length_of(gzip.compress),
    "gzip that is none": header("Content-Encoding", "gzip"),
    "a coding of the transfer": header("Transfer-Encoding", "gzip"),
    "chunks": chunked(lambda body: b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)),
    "chunks that end early": chunked(lambda body: b"5\r\nabcde\r\n0\r\n\r\n"),
    "a chunk of 2**64": chunked(lambda body: b"ffffffffffffffff\r\n" + body),
    "a negative chunk": chunked(lambda body: b"-5\r\n" + body),
    "a chunk that is no number": chunked(lambda body: b"xyz\r\n" + body),
    "a chunk with a long extension": chunked(lambda body: b"5;" + b"x" * 70_000 + b"\r\n" + body),
    "200": status("200 OK"),
    "204": both(status("204 OK"), length_of(lambda body: b"")),
    "206 in parts": header("Content-Type", "multipart/byteranges; boundary=x"),
    "304": both(status("304 OK"), length_of(lambda body: b"")),
    "300 without a place": both(status("302 OK"), length_of(lambda body: b"")),
    "412": status("412 OK"),
    "416": status("416 OK"),
    "999": status("999 OK"),
    "1000": status("1000 OK"),
    "no status": status("OK"),
    "101": status("101 OK"),
    "many headers": extra(b"X: y\r\n" * 300),
    "a long header": extra(b"X: " + b"y" * 100_000 + b"\r\n"),
    "no header": extra(b"\0\0\0\r\n: \r\n\r\n"),
    "to a file": moved("file:///etc/passwd"),
    "to FTP": moved("ftp://127.0.0.1/a"),
    "to data": moved("data:text/plain,abc"),
    "to nothing": moved("//"),
    "to a line": moved("/a.safetensors?b\tc"),
    "to a port that is closed": moved("http://127.0.0.1:1/a.safetensors"),
    "to itself with a password": moved("http://a:b@127.0.0.1:{port}/a.safetensors"),
}  # fmt: skip


def lie(change, when):
    def fault(handler, number):
        if not when(number):
            return False
        answer = Answer(handler)
        change(answer)
        with contextlib.suppress(OSError):  # the client hangs up
            port = str(handler.server_state.port)
            answer.headers["Location"] = (answer.headers.get("Location") or "").replace("{port}", port)
            answer.send(handler.wfile.write)
            handler.wfile.flush()
            handler.hang_up()
        return True

    return fault


WHEN = {
    "always": lambda _: True,
    "at first": lambda number: number == 0,
    "later": lambda number: number > 0,
    "once later": lambda number: number == 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("times", [["at first", "once later"], pytest.param(["later"], marks=pytest.mark.nightly)])
def test_a_lie_is_noticed_or_does_no_harm(name, times, served, url, key, images):
    chosen = [30, 3, 17]
    for when in times:
        served.faults = lie(LIES[name], WHEN[when])
        served.requests.clear()
        entry = f"{url}?{when.replace(' ', '-')}"  # which the cache keeps apart
        with (
            contextlib.suppress(OSError, fastrack.FormatError, fastrack.AuthenticationError),
            fastrack.load_file(entry) as file,
        ):
            for use in (fastrack.unseal, fastrack.to_device):
                got = use(file["images"][chosen], keys=key, framework="numpy")
                np.testing.assert_array_equal(got, images[chosen], err_msg=when)
        assert len(served.requests) <= 8 * retries.ATTEMPTS, when
        served.faults = lambda handler, number: False
        with fastrack.load_file(entry) as file:  # which uses what was kept
            got = fastrack.unseal(file["images"], key, framework="numpy")
            np.testing.assert_array_equal(got, images, err_msg=when)


FLOODS = {
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 2000,
    "headers": b"",
    "body": b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-262143/10000000\r\n\r\n" + bytes(1 << 16),
    "chunks": b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-262143/10000000\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"1\r\nx\r\n" * 10_000,
    "bytes": bytes(1 << 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_an_answer_without_an_end_is_given_up(name, served, url):
    sent = 0

    def flood(handler):
        nonlocal sent
        data = FLOODS[name] or b"HTTP/1.1 206 OK\r\n"
        with contextlib.suppress(OSError):  # the client hangs up
            for _ in range(3000):
                handler.wfile.write(data)
                handler.wfile.flush()
                sent += len(data)
                if name in {"headers", "body", "chunks"}:
                    data = b"X: y\r\n" if name == "headers" else data[-(1 << 15) :]
        handler.close_connection = True

    served.faults = lambda handler, number: (flood(handler), True)[1]
    with pytest.raises((OSError, fastrack.FormatError)):
        fastrack.load_file(url)
    assert sent < retries.ATTEMPTS * 16 * MIB  # with what the buffers of the connections hold


def test_a_server_that_never_ends_its_headers_is_given_up(served, url, limited):
    limited(answer_time=0.05, slowest_answer=1 << 30, attempts=2)
    stop = threading.Event()

    def drip(handler):
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 206 OK\r\nX: ")
            while not stop.wait(0.01):
                handler.wfile.write(b"y")
                handler.wfile.flush()

    served.faults = lambda handler, number: (drip(handler), True)[1]
    try:
        with pytest.raises(OSError, match="KiB a second"):
            fastrack.load_file(url)
    finally:
        stop.set()


def test_a_redirection_takes_no_password_to_another_server(served, url, key, images):
    with RangeServer(served.folder) as other:
        seen = []
        other.faults = lambda handler, number: bool(seen.append(dict(handler.headers)))
        served.faults = lambda handler, number: (
            handler.refuse(302, Location=other.url("a.safetensors").replace("//", "//user:other@")),
            True,
        )[1]
        with fastrack.load_file(url.replace("//", "//user:hunter2@") + "?signature=hunter3") as file:
            np.testing.assert_array_equal(fastrack.unseal(file["images"][3], key, framework="numpy"), images[3])
    assert seen
    assert not any("Authorization" in headers or "hunter" in str(headers) for headers in seen)
