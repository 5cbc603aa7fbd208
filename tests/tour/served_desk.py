"""Serve the desk of a holder that trusts made-up vendors. Steps that have the name of an error raise it."""

import json
import sys
from datetime import timedelta
from pathlib import Path

from helpers.tour_files import open_desk, read_roots

from fastrack import errors, tour

SECRET = "which the policy allows"
RAISED = {
    "AttestationError": errors.AttestationError(SECRET, evidence="TDX quote", field="mrtd", found="ab", wanted=SECRET),
    "UnknownKeyError": errors.UnknownKeyError(SECRET),
    "KeyError": KeyError(SECRET),
    **{
        name: getattr(errors, name)(f"{name}: expected this,\n got that. \x1b[31m {'x' * 5000}")
        for name in ("RollbackError", "GrantError", "SignatureError", "FormatError", "AuthenticationError")
    },
}


class Desk:
    def __init__(self, desk):
        self.desk = desk

    def ask(self, step, body=b""):
        if step in RAISED:
            raise RAISED[step]
        return self.desk.ask(step, body)


def main(path):
    given = json.loads(Path(path).read_text())
    folder = Path(path).parent
    lease = timedelta(seconds=given["lease"]) if "lease" in given else None
    offset, roots = timedelta(seconds=given["offset"]), read_roots(given["roots"])
    desk = open_desk(folder, given["name"], offset, roots, lease)
    tour.serve(Desk(desk), host="127.0.0.1", rate=1e6, burst=10**6, **given["options"])


if __name__ == "__main__":
    main(sys.argv[1])
