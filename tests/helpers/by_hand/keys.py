"""Files of keys: key files, key pairs, and keys that others have wrapped."""

import base64
import re
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, mldsa, mlkem, x25519
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
from cryptography.hazmat.primitives.hpke import MLKEM768X25519PrivateKey
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_private_key

from helpers.by_hand import messages
from helpers.by_hand.documents import (
    RefusedError,
    is_hexadecimal,
    is_number,
    load_line,
    members,
    read_base64,
    require,
)

SIZES = {"Ed25519": (32, 32), "ML-DSA-65": (32, 1952), "MLKEM768_X25519": (96, 1216), "P-384": (48, 97)}
SIGNING = {"Ed25519": ed25519.Ed25519PublicKey, "ML-DSA-65": mldsa.MLDSA65PublicKey}
NAME = re.compile("[!-~]([ -~]{0,62}[!-~])?")
PROVIDERS = {  # algorithms, and names of parameters
    "pkcs11": ({"RSA-OAEP-SHA256", "RSA-OAEP-SHA1", "AES-KW"}, ["uri"]),
    "tpm": ({"TPM2-SEALED"}, ["parent"]),
    "vault-transit": ({"transit"}, ["mount", "name"]),
    "aws-kms": ({"SYMMETRIC_DEFAULT"}, ["key"]),
    "gcp-kms": ({"GOOGLE_SYMMETRIC_ENCRYPTION"}, ["key"]),
    "azure-keyvault": ({"RSA-OAEP-SHA256"}, ["key"]),
    "passphrase": ({"Argon2id-AES-256-GCM"}, ["iterations", "lanes", "memory", "salt"]),
}
OAEP_HASHES = {"RSA-OAEP-SHA256": hashes.SHA256, "RSA-OAEP-SHA1": hashes.SHA1}


def read_key_file(content):
    text = content.decode("ascii")
    line = re.fullmatch(r"# fastrack key, (128|256) bits, id ([0-9a-f]{32})\nfastrack-key-1:([0-9a-f]+)\n?", text)
    require(line, "two lines of a key file")
    bits, key_id, key = line.groups()
    require(len(key) * 4 == int(bits), "a key of its size")
    require(messages.key_id(bytes.fromhex(key)) == key_id and set(key) != {"0"}, "a key with its id")
    return {"key": key, "id": key_id}


def read_secret_file(content):
    _, algorithm, public = open_secret(content)
    return {"algorithm": algorithm, "id": pair_id(algorithm, public), "public": base64.b64encode(public).decode()}


def open_secret(content):
    """Return a key pair: its private key, algorithm and public key."""
    text = content.decode("ascii")
    head, algorithm, digits = re.fullmatch("([^\n]*)\nfastrack-secret-1:([^:\n]+):([0-9a-f]+)\n?", text).groups()
    require(len(digits) == 2 * SIZES[algorithm][0], "a secret of its size")
    secret = bytes.fromhex(digits)
    if algorithm == "P-384":
        private = ec.derive_private_key(int.from_bytes(secret, "big"), ec.SECP384R1())
        public = private.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    elif algorithm == "MLKEM768_X25519":
        parts = mlkem.MLKEM768PrivateKey.from_seed_bytes(secret[:64]), x25519.X25519PrivateKey
        parts = parts[0], parts[1].from_private_bytes(secret[64:])
        public = b"".join(part.public_key().public_bytes_raw() for part in parts)
        private = MLKEM768X25519PrivateKey(*parts)
    else:
        make = ed25519.Ed25519PrivateKey.from_private_bytes if algorithm == "Ed25519" else None
        private = (make or mldsa.MLDSA65PrivateKey.from_seed_bytes)(secret)
        public = private.public_key().public_bytes_raw()
    require(head == f"# fastrack secret key, {algorithm}, id {pair_id(algorithm, public)}", "a head with its id")
    return private, algorithm, public


def read_public_file(content):
    text = content.decode("ascii")
    line, _, name = text.removesuffix("\n").partition(" ")
    require(NAME.fullmatch(name) if " " in text else not name, "a name")
    algorithm, public = read_public(line)
    return {"algorithm": algorithm, "id": pair_id(algorithm, public), "name": name}


def read_public(line):
    """Return the algorithm and the public key of a line without a name."""
    label, algorithm, encoded = line.split(":")
    require(label == "fastrack-public-1", "a public key")
    public = read_base64(encoded, [SIZES[algorithm][1]])
    if algorithm == "P-384":
        require(public[0] == 4, "an uncompressed point")
        ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), public)
    if algorithm == "MLKEM768_X25519":
        mlkem.MLKEM768PublicKey.from_public_bytes(public[:1184])
    return algorithm, public


def pair_id(algorithm, public):
    return sha256(b"fastrack/public-key-id@1\0" + algorithm.encode() + b"\0" + public).hexdigest()[:32]


def is_signed(owner, signature, text):
    """Return True if the owner of a public line signed a text."""
    algorithm, public = read_public(owner)
    try:
        SIGNING[algorithm].from_public_bytes(public).verify(signature, text)
    except InvalidSignature:
        return False
    return True


def read_wrapped(content):
    """Return the members of a wrapped key file."""
    document = members(load_line(content, 65536), "version key bits provider algorithm parameters ciphertext")
    require(is_number(document["version"]) and document["version"] == 1, "version 1")
    require(is_hexadecimal(document["key"], 32), "the id of a key")
    require(is_number(document["bits"]) and document["bits"] in {128, 256}, "a size")
    algorithms, names = PROVIDERS[document["provider"]]
    parameters = document["parameters"]
    require(document["algorithm"] in algorithms, "an algorithm of the provider")
    required = parameters.keys() - ({"pcrs"} if document["provider"] == "tpm" else set())
    require(required == set(names), "parameters of the provider")
    require(all(re.fullmatch("[ -~]{1,2048}", value) for value in parameters.values()), "parameters")
    if document["provider"] == "pkcs11":
        require(parameters["uri"].startswith("pkcs11:") and "?" not in parameters["uri"], "a URI without a query")
    read_base64(document["ciphertext"], range(1, 8193))
    return document


def unwrap(document, wrapping_key):
    """Return the bytes of the key: `wrapping_key` is an RSA private key, or the bytes of an AES key."""
    ciphertext = base64.b64decode(document["ciphertext"])
    if document["algorithm"] == "AES-KW":
        try:
            return aes_key_unwrap(wrapping_key, ciphertext)
        except InvalidUnwrap:
            raise RefusedError("authentication", "a key that this one wrapped") from None
    used = OAEP_HASHES[document["algorithm"]]()
    try:
        return wrapping_key.decrypt(ciphertext, OAEP(MGF1(used), used, None))
    except ValueError:
        raise RefusedError("authentication", "a key that was encrypted for this one") from None


def read_wrapped_key(content, wrapping=None, decrypted=None):
    """Open a wrapped key by the key that wrapped it, or take what a service has decrypted."""
    document = read_wrapped(content)
    if wrapping is not None:
        is_aes = document["algorithm"] == "AES-KW"
        decrypted = unwrap(document, wrapping if is_aes else load_der_private_key(wrapping, None))
    require(len(decrypted) * 8 == document["bits"], "a key of the size", "unknown-key")
    require(messages.key_id(decrypted) == document["key"], "a key of the id", "unknown-key")
    return {
        "key": decrypted.hex(),
        "id": document["key"],
        "provider": document["provider"],
        "algorithm": document["algorithm"],
    }
