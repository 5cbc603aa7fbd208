"""Messages and keys by the standard library and pyca's Cobblestone.

Readers take a cipher, a module that has `derive` and `unseal`: this one, or `helpers.reference`.
"""

import hmac
from hashlib import sha512

from cryptography import cobblestone
from cryptography.exceptions import InvalidTag

from helpers.by_hand.documents import RefusedError, require

HEADER_SIZE, CHUNK_SIZE, TAG_SIZE = 56, 16384, 16
_SEALERS = {16: cobblestone.Cobblestone128Encryptor, 32: cobblestone.Cobblestone256Encryptor}
_OPENERS = {16: cobblestone.Cobblestone128Decryptor, 32: cobblestone.Cobblestone256Decryptor}


def seal(secret, context, plain):
    sealer = _SEALERS[len(secret)](secret, context)
    return sealer.update(bytes(plain)) + sealer.finalize()


def unseal(secret, context, message):
    opener = _OPENERS[len(secret)](secret, context)
    return opener.update(bytes(message)) + opener.finalize()


def message_size(plain):
    return HEADER_SIZE + plain + TAG_SIZE * (plain // CHUNK_SIZE + 1)


def expand(secret, info, length):
    """Return HKDF-Expand-SHA-512 (RFC 5869, section 2.3)."""
    blocks = [b""]
    while 64 * (len(blocks) - 1) < length:
        blocks.append(hmac.digest(secret, blocks[-1] + info + bytes([len(blocks)]), sha512))
    return b"".join(blocks)[:length]


def derive(secret, salt, context):
    """Derive the key, the base nonce of 12 bytes and the commitment of 32 of a message."""
    info = f"c2sp.org/chunked-encryption@v1+AEAD_AES_{8 * len(secret)}_GCM\0".encode() + salt + context
    return expand(secret, info, len(secret) + 44)


def key_id(secret):
    return expand(secret, b"fastrack/key-id@1\0" + bytes([len(secret)]), 16).hex()


def open_message(cipher, secret, context, message, size):
    """Open a message that has to be of this size."""
    require(len(message) == message_size(size), "a message of the size")
    try:
        return cipher.unseal(secret, context, message)
    except InvalidTag:
        raise RefusedError("authentication", "a commitment or tag of this key and context") from None


def check_commitment(cipher, secret, context, header):
    """Compare a salt and commitment with those of a key and context."""
    found = cipher.derive(secret, header[:24], context)[len(secret) + 12 :]
    require(hmac.compare_digest(found, header[24:]), "the commitment of this key and context", "authentication")
