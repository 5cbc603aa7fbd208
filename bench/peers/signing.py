"""Sign a model and check it: manifests beside OpenSSF's model-signing. Run as `python -m bench.peers.signing`.

model-signing hashes all bytes of plain files, to sign and to verify. A manifest lists the headers of sealed messages,
which pin their bytes; to check all of these is to verify their tags. The same folder of four files is signed and
checked in each way, in turns, from a warm cache.
"""

import argparse
import json
import tempfile
from pathlib import Path
from random import Random

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from bench.machine import read_machine
from fastrack import Anchor, Key, load_file, publish, save_file, verify_file
from fastrack._bench.measure import Times, interleave
from fastrack.grants import Signer

FILES, TENSORS = 4, 16  # of the folder, and of each file
REFERENCE = "model-signing, SHA-256: verify"


def ways_of(folder, mib):
    """Make the folder, plain and sealed, with its keys, and return a function for each way, by its name."""
    key, owner = Key.generate(), Signer.generate()
    plain, sealed, digests = folder / "plain", folder / "sealed", folder / "digests"
    for number in range(FILES):
        generator = np.random.default_rng(number)
        size = (mib << 20) // FILES // TENSORS
        tensors = {f"{number}.{row}": generator.integers(0, 256, size, np.uint8) for row in range(TENSORS)}
        for each in (plain, sealed, digests):
            each.mkdir(exist_ok=True)
        (plain / f"{number}.bin").write_bytes(b"".join(tensor.tobytes() for tensor in tensors.values()))
        for each in (sealed, digests):
            save_file(tensors, each / f"{number}.safetensors", key)
    publish(sealed, signer=owner)
    Anchor.create(folder / "anchor", owner=owner.verifier)
    files = sorted(sealed.glob("*.safetensors"))

    def check():
        for file in files:
            with load_file(file, anchor=folder / "anchor") as opened:
                verify_file(opened, key)

    def check_headers():
        for file in files:
            load_file(file, anchor=folder / "anchor").close()

    ways = {
        "fastrack: publish": lambda: publish(sealed, signer=owner),
        "fastrack: publish, with digests": lambda: publish(digests, signer=owner, digests=True),
        "fastrack: open, all headers checked": check_headers,
        "fastrack: verify all tags": check,
    }
    for name, algorithm in (("SHA-256", "sha256"), ("BLAKE3", "blake3")):
        sign, verify = model_signing(plain, folder, algorithm)
        ways |= {f"model-signing, {name}: sign": sign, f"model-signing, {name}: verify": verify}
    return ways


def model_signing(plain, folder, algorithm):
    """Return functions that sign the plain folder and that verify its signature."""
    from model_signing import hashing, signing, verifying

    private = ec.generate_private_key(ec.SECP256R1())
    secret, public, signature = (folder / f"{algorithm}.{suffix}" for suffix in ("key", "pub", "sig"))
    secret.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    hashes = hashing.Config().use_file_serialization(hashing_algorithm=algorithm)
    signer = signing.Config().use_elliptic_key_signer(private_key=secret).set_hashing_config(hashes)
    verifier = verifying.Config().use_elliptic_key_verifier(public_key=public).set_hashing_config(hashes)
    return lambda: signer.sign(plain, signature), lambda: verifier.verify(plain, signature)


def main():
    """Measure, and print seconds, speeds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256, metavar="MIB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ways = ways_of(Path(folder), options.size)
        times = interleave(ways, options.rounds, order=Random(0))
    rows = {name: Times(seconds) for name, seconds in times.items()}
    for name, row in rows.items():
        speed = (options.size << 20) / row.median / 1e9
        ratio = row.median / rows[REFERENCE].median
        print(f"{name:38}{1e3 * row.median:10.1f} ms{speed:8.2f} GB/s{ratio:8.2f} of {REFERENCE}")
    if options.json:
        found = {name: row.as_dict() for name, row in rows.items()}
        options.json.write_text(json.dumps({**read_machine(), "size_mib": options.size, "times": found}, indent=1))


if __name__ == "__main__":
    main()
