"""Serve a broker that trusts made-up vendors, and whose clock runs as the made-up evidence needs it."""

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fastrack
from fastrack import attest
from fastrack._service import handlers, limits, server
from fastrack.attest._broker import ledger, service
from fastrack.attest._broker.app import make_app
from fastrack.grants import Signer


def main(path):
    given = json.loads(Path(path).read_text())
    folder = Path(path).parent
    offset = timedelta(seconds=given["offset"])
    settings = service.Settings(
        attest.Policy.from_toml(folder / "policy.toml"),
        roots=attest.TrustedRoots(**{name: frozenset(found) for name, found in given["roots"].items()}),
        clock=lambda: datetime.now(UTC) + offset,
        lease=None if given["lease"] is None else timedelta(seconds=given["lease"]),
    )
    keys = fastrack.KeyRing(folder / "data.key")
    limit = limits.RateLimit(given["per_minute"], given["burst"])

    def make():
        broker = service.Broker(settings, keys, Signer.load(folder / "owner.signer"), ledger.Ledger(given["database"]))
        return make_app(broker, limit=limit, body_seconds=given["body_seconds"])

    certificate, private_key = folder / "tls.pem", folder / "tls.key"
    options = {"certificate": certificate, "private_key": private_key, "head_seconds": given["head_seconds"]}
    if given["rest"] is not None:
        handlers._REST = given["rest"]
    server._REQUEST_SECONDS = given["request_seconds"]
    server.serve(make, host="127.0.0.1", port=given["port"], **options)


if __name__ == "__main__":
    main(sys.argv[1])
