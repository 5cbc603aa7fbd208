"""One address floods a broker with the largest documents that it may send; another one asks for challenges meanwhile.

Run as `PYTHONPATH=.:tests python bench/bench_strangers.py` on an idle machine. The address that asks is exempt from the
broker's default limits, so that its answers can be counted. Documents of 8 MiB, made before, are small values, which
the gate refuses, and offers that only a signature refuses.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import quantiles

from helpers.foundry.machine import Machine

from fastrack import attest
from fastrack.attest._offer import OFFER_LIMIT
from fastrack.grants import Identity

CROWD, OTHER = "127.0.0.2", "127.0.0.3"
CONNECTIONS, DOCUMENTS, SECONDS = 4, 30, 15  # of the flood: an address gets 30 challenges at once, then one a second
SERVE = f"""
import sys
from functools import partial
from pathlib import Path
from fastrack import Key, KeyRing, attest, grants
from fastrack._service import limits, server
from fastrack.attest._broker import app, ledger, service
class Limit(limits.RateLimit):
    def admit(self, address):
        return 0.0 if address == {OTHER!r} else super().admit(address)
settings, database = service.Settings(attest.Policy.from_toml("version = 1")), Path(sys.argv[1]) / "broker.db"
broker = service.Broker(settings, KeyRing(Key.generate()), grants.Signer.generate(), ledger.Ledger(database))
make = partial(app.make_app, broker, limit=Limit(60, 30))
server.serve(make, host="127.0.0.1", port=0, certificate=None, private_key=None)
"""


def post(port, path, body, address):
    """Post a body from an address, and return the status and the body of the answer."""
    head = f"POST {path} HTTP/1.1\r\nHost: broker\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(address, 0)) as connection:
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return int(answer[9:12]), answer.partition(b"\r\n\r\n")[2]


def small_values(challenge, *_):
    head, tail = b'{"challenge":"%s","cpu":[' % challenge.id.encode(), b'0],"devices":0}\n'
    return head + b"1e9," * ((OFFER_LIMIT - len(head) - len(tail)) // 4) + tail


def prepared_offers(challenge, machine, recipient):
    binding = attest.OfferBinding(challenge, recipient)
    device = machine.collect(binding).devices[0]
    data = [attest.ManifestEvidence(bytes([number]) * 95_000, None) for number in range(64)]
    devices = tuple(replace(device, manifests=tuple(data[at : at + 2])) for at in range(0, 64, 2))
    evidence = attest.MachineEvidence(machine.prove(binding.report_data(devices)), devices)
    return attest.Offer(challenge.id, recipient, evidence).to_bytes()


def flood(port, documents, statuses, place):
    """Send every fourth document, and each again until it is read."""
    while True:
        try:
            status, _ = post(port, "/v1/offers", documents[place % DOCUMENTS], CROWD)
        except OSError:
            status = "before all was sent"
        statuses[status] += 1
        place += CONNECTIONS if status in {400, 403, 409} else time.sleep(0.2) or 0


def ask(port, seconds):
    """Ask for challenges, one after the other, and return the seconds of each answer."""
    taken, end = [], time.monotonic() + seconds
    while (begin := time.monotonic()) < end:
        assert post(port, "/v1/challenges", b"", OTHER)[0] == 200
        taken.append(time.monotonic() - begin)
    return taken


def compare(make, folder):
    """Print what another address gets without and with a flood, and the broker's memory before and at most."""
    broker = subprocess.Popen([sys.executable, "-c", SERVE, folder], stderr=subprocess.PIPE, text=True)
    port = json.loads(broker.stderr.readline())["port"]
    threading.Thread(target=lambda: list(broker.stderr), daemon=True).start()
    own = Machine("tdx", 1, is_small=True), Identity.generate("MLKEM768_X25519").recipient
    answers = (post(port, "/v1/challenges", b"", CROWD)[1] for _ in range(DOCUMENTS))
    documents = [make(attest.Challenge.from_bytes(answer), *own) for answer in answers]
    taken = [ask(port, DOCUMENTS)]  # until the flood may send as many at once again
    memory = [Path(f"/proc/{broker.pid}/status").read_text().partition("VmRSS:")[2].split()[0]]
    if (child := os.fork()) == 0:  # the flood does not share the interpreter of the address that asks
        statuses = Counter()
        for place in range(CONNECTIONS):
            threading.Thread(target=flood, args=(port, documents, statuses, place), daemon=True).start()
        time.sleep(SECONDS)
        os.write(1, f"{make.__name__}, answers: {dict(statuses)}\n".encode())
        os._exit(0)
    taken.append(ask(port, SECONDS))
    os.waitpid(child, 0)
    memory.append(Path(f"/proc/{broker.pid}/status").read_text().partition("VmHWM:")[2].split()[0])
    broker.terminate()
    rates = " and ".join(f"{len(each) / sum(each):.0f}" for each in taken)
    p99 = " and ".join(f"{quantiles(each, n=100)[-1]:.3f}" for each in taken)
    print(f"load {os.getloadavg()[0]:.1f}, {rates} challenges a second, p99 {p99} s; {' and '.join(memory)} KiB")


if __name__ == "__main__":
    for made in (small_values, prepared_offers):
        with tempfile.TemporaryDirectory() as given:
            compare(made, given)
