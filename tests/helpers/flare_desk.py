"""Serve a desk of a tour from the files of its folder, on the real clock. It starts without torch, which takes long."""

import json
import sys
from pathlib import Path

import fastrack
from fastrack import tour
from fastrack.attest import TrustedRoots
from fastrack.grants import Signer, Verifier

TLS = {"certificate": "tls.pem", "private_key": "tls.key", "ca": "ca.pem"}


def open_desk(folder, name, roots):
    """Open the desk of the owner or a holder."""
    owner = Verifier.load(folder / "owner.signer.pub")
    plan = tour.Chain.load(folder / "v0" / "tour.chain", owner=owner).plan
    trusted = TrustedRoots(**{kind: frozenset(found) for kind, found in roots.items()})
    given = {
        "terms": tour.Terms.from_toml(folder / f"{name}.toml", roots=trusted),
        "signer": Signer.load(folder / f"{name}.signer"),
        "ledger": tour.TourLedger(folder / f"{name}.db"),
    }
    key = fastrack.Key.load(folder / f"{name}.key")
    if name == "owner":
        return tour.OwnerDesk(plan, key, **given)
    with fastrack.load_file(folder / f"{name}.safetensors") as file:
        return tour.HolderDesk(plan, [key], files=[file.file_id], **given)


def main(path):
    given = json.loads(Path(path).read_text())
    folder = Path(path).parent
    desk = open_desk(folder, given["name"], given["roots"])
    paths = {name: folder / file for name, file in TLS.items()}
    tour.serve(desk, port=given["port"], rate=1e6, burst=10**6, **paths)


if __name__ == "__main__":
    main(sys.argv[1])
