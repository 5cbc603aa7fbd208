"""KServe's confidential storage beside sealed folders. Run as `python -m bench.peers.kserve`.

kserve-storage decrypts in place what it downloaded, before the server starts: each file is one JWE, whose key is a
resource of a Key Broker Service. The table has the processor time and the memory from the stored file to tensors, in
turns, and which models each accepts: one with two files swapped, with a file of an older version, an older version.

Features: read in kserve-storage 0.21 (`JWEDecryptor`) and RFC 7516, whose additional data is the header; tried below.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from bench.machine import read_machine
from bench.peers.child import MIB
from bench.peers.children import Child
from bench.peers.peer import Features, Peer

PEERS = ("kserve", "fastrack")
CPU, MEMORY = 1 / 3, 1.08  # fastrack's at most: of KServe's processor time, and private memory of the size of the model
RANKS = [
    f"model-rank-{rank}-part-0.safetensors" for rank in range(2)
]  # as vLLM names them: with tensors of equal names
FAULTS = ("two files swapped", "a file of an older version", "an older version")


class KServe(Peer):
    """One JWE, decrypted in place of a link to the stored file, and read by safetensors."""

    name, package = "KServe storage", "kserve-storage"
    settings = "JWE with dir and A256GCM, as its documentation has it; JWEDecryptor.decrypt_directory, then load_file"
    features = Features("no", "refused", "no", "no", "no", "every JWE", "encrypted with the rest")

    def __init__(self):
        from jwcrypto import jwk
        from kserve_storage.confidential import JWEDecryptor, SecretResolver

        class Resolver(SecretResolver):  # in the place of the one that asks the guest's hub
            def resolve_key(self, _):
                return key.export().encode()

        key = self._key = jwk.JWK.generate(kty="oct", size=256)
        self._decryptor = JWEDecryptor(Resolver(), "kbs:///models/key/owner")

    def seal(self, arrays, path):
        from safetensors.numpy import save

        path.mkdir()
        self.encrypt(save(arrays), path / "model.safetensors")

    def open(self, path):
        from safetensors.numpy import load_file

        with self.decrypted(path) as folder:
            return load_file(f"{folder}/model.safetensors")

    def encrypt(self, content, path):
        from jwcrypto import jwe

        token = jwe.JWE(content, json.dumps({"alg": "dir", "enc": "A256GCM"}), recipient=self._key)
        path.with_name(f"{path.name}.jwe").write_text(token.serialize(compact=True))

    def decrypted(self, path):
        """Return a folder for a ``with`` block, in which the files of `path` are decrypted."""
        folder = tempfile.TemporaryDirectory(dir=path.parent)
        for file in path.iterdir():
            os.link(file, Path(folder.name, file.name))
        try:
            self._decryptor.decrypt_directory(folder.name)
        except BaseException:
            folder.cleanup()
            raise
        return folder


def measure(size, rounds, folder, *, child=Child):
    """Return the figures of each peer, in turns."""
    children = {slug: child(slug, size, folder, 0) for slug in PEERS}
    found = {slug: {"cpu": [], "memory": []} for slug in PEERS}
    try:
        for slug, each in children.items():
            found[slug]["version"] = each.ask("start")["version"]
            found[slug]["stored"] = each.ask("seal")["bytes"] / (size * MIB)
            each.ask("open")  # once for what is loaded at the first use
            if not each.ask("verify")["same"]:
                raise SystemExit(f"{slug}: expected the tensors that were sealed, got others")
        for _ in range(rounds):
            for slug, each in children.items():
                each.ask("forget")
                each.ask("trim")
                reply = each.ask_watched("open")
                found[slug]["cpu"].append(reply["cpu"])
                found[slug]["memory"].append(reply["owned"] / (size * MIB))
                each.ask("forget")
    finally:
        for each in children.values():
            each.end()
    return {
        slug: {name: median(value) if isinstance(value, list) else value for name, value in row.items()}
        for slug, row in found.items()
    }


def try_faults(folder):
    """Return what either says of each fault, by the names of the peers."""
    for version in range(2):
        plain = folder / f"plain-{version}"
        plain.mkdir()
        for rank, name in enumerate(RANKS):
            write(plain / name, 10 * version + rank)
    return {"kserve": _try_kserve(folder), "fastrack": _try_fastrack(folder)}


def write(path, value):
    from safetensors.numpy import save_file

    save_file({"weight": np.full(1024, value, np.float32)}, path)


def read(folder):
    """Return the values that two ranks read."""
    from safetensors.numpy import load_file

    return [int(load_file(Path(folder, name))["weight"][0]) for name in RANKS]


def _try_kserve(folder):
    peer, (old, new) = KServe(), (folder / "jwe-0", folder / "jwe-1")
    for version, path in enumerate((old, new)):
        path.mkdir()
        for name in RANKS:
            peer.encrypt((folder / f"plain-{version}" / name).read_bytes(), path / name)

    def open_it(path, _):
        with peer.decrypted(path) as opened:
            return read(opened)

    return _outcomes(old, new, [f"{name}.jwe" for name in RANKS], open_it)


def _try_fastrack(folder):
    from fastrack import Anchor, Key, mount_folder, publish, seal_folder
    from fastrack.grants import Signer

    key, owner, (old, new) = Key.generate(), Signer.generate(), (folder / "sealed-0", folder / "sealed-1")
    for version, path in enumerate((old, new)):
        seal_folder(folder / f"plain-{version}", path, key)
        if version:
            shutil.copy(old / "fastrack.manifest", path)
        publish(path, signer=owner)
    Anchor.create(folder / "anchor", owner=owner.verifier)

    def open_it(path, has_seen):
        with mount_folder(path, key, anchor=folder / "anchor" if has_seen else None) as opened:
            return read(opened)

    return _outcomes(old, new, RANKS, open_it)


def _outcomes(old, new, names, open_it):
    """Return the outcome of each fault; the last one comes to a machine that has opened the newer version."""
    first, second = names
    changed = [shutil.copytree(new, new.with_name(f"{new.name}-{number}")) for number in range(2)]
    for here, there in ((first, second), (second, first)):
        shutil.copy(new / there, changed[0] / here)
    shutil.copy(old / first, changed[1] / first)
    cases = ((new, True, [10, 11]), (changed[0], False, [11, 10]), (changed[1], False, [0, 11]), (old, True, [0, 1]))
    outcomes = []
    for path, has_seen, expected in cases:
        try:
            found = open_it(path, has_seen)
        except Exception as error:  # noqa: BLE001 - a refusal, whatever its kind
            outcomes.append(f"refused: {type(error).__name__}")
        else:
            outcomes.append("accepted" if found == expected else f"other weights: {found}")
    if outcomes[0] != "accepted":
        raise SystemExit(f"{new.name}: expected a model that opens, got one that is {outcomes[0]}")
    return dict(zip(FAULTS, outcomes[1:], strict=True))


def table(rows, outcomes):
    """Return the table as lines, and whether fastrack keeps what it has to keep beside KServe."""
    lines = ["| | version | CPU time | memory, of the model | stored, of the model | " + " | ".join(FAULTS) + " |"]
    lines.append("|---|---|---:|---:|---:|---|---|---|")
    for slug, row in rows.items():
        cells = [slug, row["version"], f"{row['cpu']:.2f} s", f"{row['memory']:.2f}", f"{row['stored']:.3f}"]
        lines.append(f"| {' | '.join([*cells, *outcomes[slug].values()])} |")
    ratio = rows["fastrack"]["cpu"] / rows["kserve"]["cpu"]
    is_kept = ratio <= CPU and rows["fastrack"]["memory"] <= MEMORY
    is_kept &= all(outcome.startswith("refused") for outcome in outcomes["fastrack"].values())
    lines.append(f"\nCPU time of fastrack, of KServe's: {ratio:.3f}")
    return lines, is_kept


def main(argv):
    """Measure and print. Gives 1 if fastrack takes more than it may, or accepts a fault."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.kserve", description=__doc__)
    parser.add_argument("--size", type=int, default=256, metavar="MIB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fastrack-peers-") as folder:
        rows, outcomes = measure(options.size, options.rounds, Path(folder)), try_faults(Path(folder))
    lines, is_kept = table(rows, outcomes)
    print("\n".join(lines))
    if options.json:
        document = {**read_machine(), "size_mib": options.size, "peers": rows, "outcomes": outcomes}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(not is_kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
