"""A machine of a made-up vendor in a process of its own, on the real clock, which other processes ask for evidence."""

import json
import os
import sys
from datetime import UTC, datetime
from multiprocessing.connection import Client, Listener

PORT = "FASTRACK_TEST_MACHINE"
_SECRET = b"made up"  # so that nothing else on this machine is unpickled


def collect(binding):
    """Ask the machine for evidence, as `collect_evidence` asks its own."""
    from fastrack import attest

    with Client(("127.0.0.1", int(os.environ[PORT])), authkey=_SECRET) as machine:
        machine.send_bytes(binding.report_data(()))
        return attest.MachineEvidence(machine.recv(), ())


def main():
    os.environ["FASTRACK_TEST_NOW"] = datetime.now(UTC).isoformat(timespec="seconds")  # which the foundry reads
    from helpers.foundry.machine import Machine
    from helpers.tour_files import trusted_roots

    machine = Machine("snp", 0)
    with Listener(("127.0.0.1", 0), authkey=_SECRET) as listener:
        line = {"event": "listening", "port": listener.address[1], "roots": trusted_roots()}
        sys.stderr.write(json.dumps(line) + "\n")
        while True:
            with listener.accept() as asker:
                asker.send(machine.prove(asker.recv_bytes()))


if __name__ == "__main__":
    main()
