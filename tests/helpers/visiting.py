"""Make a visit of a tour at a holder's desk that is served elsewhere, with the owner's desk in this process.

``python visiting.py FOLDER``. Its training code takes shards until its keys end, and appends the time of each to a log.
It ends with one line on stderr: the error of the visit.
"""

import json
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path


def train(state, shards):
    with Path("visit.log").open("a") as log:
        for _ in shards:
            log.write(f"{time.time()}\n")
            log.flush()
            if Path("enough").exists():
                break
            time.sleep(0.02)
    return state


def main(folder):
    from fastrack import FastrackError, tour
    from fastrack.grants import Verifier
    from helpers import made_up_machine
    from helpers.tour_files import open_desk, read_roots
    from helpers.visiting import train

    given = json.loads((folder / "visiting.json").read_text())
    paths = {"certificate": "tls.pem", "private_key": "tls.key", "ca": "ca.pem"}
    remote = tour.RemoteDesk(given["url"], timeout=5, **{name: folder / path for name, path in paths.items()})
    desk = open_desk(folder, "owner", timedelta(0), read_roots(given["roots"]))
    try:
        tour.visit(
            folder / "v0",
            folder / "v1",
            train,
            owner=Verifier.load(folder / "owner.signer.pub"),
            owner_desk=desk,
            holder_desk=remote,
            data=2000 * [folder / "a.safetensors"],
            collect=made_up_machine.collect,
            clock=lambda: datetime.now(UTC),
        )
    except FastrackError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        if given["lingers"]:  # so that its memory can be searched
            time.sleep(60)
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
