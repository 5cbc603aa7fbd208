"""The services of Intel, AMD and NVIDIA on a loopback address, which answer about made-up machines."""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, quote, urlsplit

from cryptography.x509 import ocsp

from fastrack.attest import CollateralServices  # before tests exchange the roots of the vendors, its default
from helpers.foundry import nvidia, snp, tdx


class VendorServices:
    """A server. `asked` counts the requests by path; `answers` has what is answered in place, by path, once each."""

    def __init__(self, machine):
        self.machine = machine
        self.asked = Counter()
        self.queries = {}
        self.answers = {}
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                service._answer(self, b"")

            def do_POST(self):
                service._answer(self, self.rfile.read(int(self.headers["Content-Length"])))

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self._server.server_port}"
        self.services = CollateralServices(*[self.base] * 5)
        self.options = " ".join(f"--{name.replace('_', '-')} {url}" for name, url in asdict(self.services).items())

    @contextmanager
    def running(self):
        thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def _answer(self, handler, body):
        parts = urlsplit(handler.path)
        self.asked[parts.path] += 1
        self.queries[parts.path] = parse_qs(parts.query)
        planned = self.answers.get(parts.path, [])
        status, headers, content = planned.pop(0) if planned else self.respond(parts.path, body)
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)

    def respond(self, path, body):
        """Return status, headers and body of the right answer."""
        if path == "/":
            return 200, {"Content-Type": "application/ocsp-response"}, self._status(body)
        if path.startswith("/v1/rim/"):
            return self._manifest(path.removeprefix("/v1/rim/"))
        return self._intel(path) if self.machine.cpu == "tdx" else self._amd(path)

    def _intel(self, path):
        parts = tdx.collateral()
        chain = quote(parts["tcb_info_issuer_chain"])
        if path == "/tdx/certification/v4/tcb":
            return (
                200,
                {"TCB-Info-Issuer-Chain": chain},
                signed("tcbInfo", parts["tcb_info"], parts["tcb_info_signature"]),
            )
        if path == "/tdx/certification/v4/qe/identity":
            text, signature = parts["qe_identity"], parts["qe_identity_signature"]
            return 200, {"SGX-Enclave-Identity-Issuer-Chain": chain}, signed("enclaveIdentity", text, signature)
        if path == "/sgx/certification/v4/pckcrl":
            return 200, {"SGX-PCK-CRL-Issuer-Chain": quote(parts["pck_crl_issuer_chain"])}, parts["pck_crl"]
        return (
            (200, {}, parts["root_ca_crl"]) if path == "/IntelSGXRootCA.der" else (404, {"Request-ID": "7" * 32}, b"")
        )

    def _amd(self, path):
        base, chip = "/vcek/v1/Milan/", self.machine.chip
        contents = {"cert_chain": chip.issuers, "crl": self.machine.crl, snp.CHIP_ID.hex(): chip.leaf}
        content = contents.get(path.removeprefix(base)) if path.startswith(base) else None
        return (404, {}, b"") if content is None else (200, {}, content)

    def _manifest(self, rim_id):
        driver, vbios = (manifest.data for manifest in self.machine.manifests[0])
        data = driver if "_DRIVER_" in rim_id else vbios
        return 200, {"Content-Type": "application/json"}, manifest_answer(rim_id, data)

    def _status(self, body):
        serial = ocsp.load_der_ocsp_request(body).serial_number
        chains = [device.chain[1:] for device in self.machine.devices] + [nvidia.rim_signer().chain]
        for chain in chains:
            for authority, response in zip(chain, nvidia.statuses(chain), strict=False):
                if authority.certificate.serial_number == serial:
                    return response
        raise AssertionError(f"expected a certificate of the machine, got serial number {serial:x}")


def signed(member, text, signature):
    return b'{"' + member.encode() + b'":' + text + b',"signature":"' + signature.hex().encode() + b'"}'


def manifest_answer(rim_id, data, **changes):
    members = {"id": rim_id, "rim": b64encode(data).decode(), "sha256": sha256(data).hexdigest(), "rim_format": "TCG"}
    return json.dumps(members | changes).encode()
