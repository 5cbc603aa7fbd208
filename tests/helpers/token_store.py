"""A server of S3 on loopback, with one bucket, whose session tokens end when a test says so.

It answers as Amazon S3 is documented to. API reference, "Error responses": a token that has ended is 400 ExpiredToken,
in XML whose first element is the code. RFC 9110, section 9.3.2: an answer to HEAD has no body, so that clients see 400
alone. API reference: GetObject with a range, PutObject, HeadObject, CreateMultipartUpload, UploadPart,
CompleteMultipartUpload, AbortMultipartUpload, ListObjectsV2. User guide, "Download and upload objects with presigned
URLs": a URL that was signed with a token ends with the token. Nothing compares signatures.
"""

from __future__ import annotations

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

ERROR = "<?xml version='1.0' encoding='UTF-8'?>\n<Error><Code>{}</Code><Message>{}</Message></Error>"


class TokenStore:
    """Serve a bucket. `ended` has the tokens that are refused, and `asked` method, token and query of each request."""

    def __init__(self):
        self.objects, self.uploads = {}, {}
        self.ended, self.asked, self.refused = set(), [], []
        self.after = lambda method, query: None  # called once a request was answered, as to end its token
        self.lock = threading.Lock()
        owner = self

        class Handler(_Handler):
            store = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def tokens(self):
        """Return the tokens that were used, in the order of their first use."""
        with self.lock:
            return list(dict.fromkeys(token for _, token, _ in self.asked))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: TokenStore

    def log_message(self, *_):
        """Say nothing."""

    def _serve(self):
        place = urlsplit(self.path)
        self.query = dict(parse_qsl(place.query, keep_blank_values=True))
        self.key = unquote(place.path).lstrip("/").partition("/")[2]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = unchunked(body)
        token = self.query.get("X-Amz-Security-Token") or self.headers.get("X-Amz-Security-Token", "")
        with self.store.lock:
            self.store.asked.append((self.command, token, self.query))
            is_ended = token in self.store.ended
            if is_ended:
                self.store.refused.append((self.command, token))
        if is_ended:
            self.refuse(400, "ExpiredToken", "The provided token has expired.")
        else:
            getattr(self, f"_{self.command.lower()}")(body)
            self.store.after(self.command, self.query)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - as the base class has them

    def _get(self, _body):
        if not self.key:
            prefix = self.query.get("prefix", "")
            entries = "".join(
                f"<Contents><Key>{key}</Key><Size>{len(content)}</Size><ETag>{tag(content)}</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for key, content in sorted(self.store.objects.items())
                if key.startswith(prefix)
            )
            listed = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
            return self.answer(200, listed.encode())
        content = self.store.objects.get(self.key)
        if content is None:
            return self.refuse(404, "NoSuchKey", "The specified key does not exist.")
        if "Range" not in self.headers:
            return self.answer(200, content, ETag=tag(content))
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        last = min(last, len(content) - 1)
        place = f"bytes {first}-{last}/{len(content)}"
        return self.answer(206, content[first : last + 1], ETag=tag(content), Content_Range=place)

    def _head(self, _body):
        content = self.store.objects.get(self.key)
        if content is None:
            return self.refuse(404, "NoSuchKey", "")
        return self.answer(200, content, ETag=tag(content), Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT")

    def _put(self, body):
        if "uploadId" in self.query:
            self.store.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = body
        else:
            self.store.objects[self.key] = body
        self.answer(200, b"", ETag=tag(body))

    def _post(self, _body):
        if "uploads" in self.query:
            name = f"upload-{len(self.store.uploads)}"
            self.store.uploads[name] = {}
            told = f"<UploadId>{name}</UploadId>"
            return self.answer(200, f"<InitiateMultipartUploadResult>{told}</InitiateMultipartUploadResult>".encode())
        parts = self.store.uploads.pop(self.query["uploadId"])
        content = self.store.objects[self.key] = b"".join(parts[number] for number in sorted(parts))
        told = f"<ETag>{tag(content)}</ETag>"
        return self.answer(200, f"<CompleteMultipartUploadResult>{told}</CompleteMultipartUploadResult>".encode())

    def _delete(self, _body):
        if "uploadId" in self.query:
            self.store.uploads.pop(self.query["uploadId"], None)
        else:
            self.store.objects.pop(self.key, None)
        self.answer(204, b"")

    def refuse(self, status, code, message):
        self.answer(status, ERROR.format(code, message).encode(), Content_Type="application/xml")

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def tag(content):
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def unchunked(body):
    """Return what a client of S3 sent in signed chunks: lines of ``SIZE;chunk-signature=...``, each with its bytes."""
    found, rest = b"", body
    while True:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        if not size:
            return found
        found, rest = found + rest[:size], rest[size + 2 :]
