"""A stand-in for the REST server of the Confidential Data Hub, as neither that nor a Key Broker Service is a package.

It answers as the sources of confidential-containers/guest-components say: `api-server-rest/src/router.rs` (commit
095b0980) has the paths, the statuses and their texts, `confidential-data-hub/hub/src/bin/ttrpc_server/mod.rs` the one
text for all failures of the hub. What an attestation decides is a set of names here.
"""

import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAILED = b'rpc status: Status { code: INTERNAL, message: "[CDH] [ERROR]: Get Resource failed", details: [] }'
BINARY = "application/octet-stream"
PIECE = 64 << 10


class DataHub(ThreadingHTTPServer):
    """The server on loopback, with resources by their names ``repository/type/tag``.

    `refused` has the names that the KBS refuses to this machine, `is_reached` says whether the hub reaches the KBS, and
    `has_resources` whether the feature is on. `faults` has functions for tags that no such server answers as it should,
    each called with the handler.
    """

    daemon_threads = True

    def __init__(self, resources, faults=None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.resources, self.refused, self.is_reached, self.has_resources = dict(resources), set(), True, True
        self.faults = faults or {}
        self.asked, self.sent = [], 0
        self.ended = threading.Event()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        hub = self.server
        hub.asked.append((self.path, dict(self.headers)))
        root, _, name = self.path.partition("/cdh/resource/")
        fault = hub.faults.get(name.rpartition("/")[2])
        with suppress(OSError):  # the client has gone
            if fault is not None:
                fault(self)
            elif root or not name:
                self.reply(404, b"URL NOT FOUND")
            elif not hub.has_resources:
                self.reply(404, b"Resource Feature Not Enabled")
            elif not hub.is_reached or name in hub.refused or name not in hub.resources:
                self.reply(500, FAILED)
            else:
                self.reply(200, hub.resources[name], **{"Content-Type": BINARY})

    def reply(self, status, body=b"", *, size=None, **headers):
        """Send an answer, whose header may say another size than it has."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body) if size is None else size)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = size is not None

    def wait(self, seconds):
        """Wait, but not beyond the end of the test."""
        self.server.ended.wait(seconds)


def slow(handler):
    handler.wait(30)
    handler.reply(200, b"late")


def dripping(handler):
    handler.reply(200, size=PIECE)
    end = time.monotonic() + 30
    while time.monotonic() < end and not handler.server.ended.is_set():
        handler.wfile.write(b"x")
        handler.wait(0.05)


def cut(handler):
    handler.reply(200, b"# fastrack key", size=119)


def huge(handler):
    handler.reply(200, size=1 << 30)
    for _ in range((1 << 30) // PIECE):
        handler.wfile.write(bytes(PIECE))
        handler.server.sent += PIECE


def redirect(handler):
    handler.reply(302, Location="/cdh/resource/models/key/owner")


def not_http(handler):
    handler.wfile.write(b"fastrack-key-1:0123456789abcdef\n")
    handler.close_connection = True


def forbidden(handler):
    handler.reply(403, b"Forbidden")  # as to a caller that is not on loopback, which no test can be


FAULTS = {
    "slow": slow,
    "dripping": dripping,
    "cut": cut,
    "huge": huge,
    "redirect": redirect,
    "not-http": not_http,
    "forbidden": forbidden,
}


@contextmanager
def running(resources):
    """Serve resources until the block ends."""
    hub = DataHub(resources, FAULTS)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        hub.shutdown()
        hub.server_close()
        thread.join()
