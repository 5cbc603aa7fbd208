"""Runs of chunks and keys by AES-GCM and HKDF of pyca/cryptography, or by the standards: no code under test."""

from functools import lru_cache, reduce
from hmac import compare_digest
from operator import xor

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

CHUNK_SIZE, TAG_SIZE = 16384, 16
SEALED_CHUNK_SIZE = CHUNK_SIZE + TAG_SIZE
X = 1 << 126  # the element x of GHASH's field
PREFIXES = {
    16: b"c2sp.org/chunked-encryption@v1+AEAD_AES_128_GCM\0",
    32: b"c2sp.org/chunked-encryption@v1+AEAD_AES_256_GCM\0",
}
_REDUCTION = 0xE1 << 120


def nonce_of(base, chunk):
    return (int.from_bytes(base) ^ chunk).to_bytes(12)


def seal(key, base, plain, first=0, *, ends=True):
    """Seal `plain` as chunks from number `first` on; `ends` adds the empty last one where the message needs it."""
    cipher = AESGCM(key)
    starts = range(0, len(plain) + 1 if ends else max(1, len(plain)), CHUNK_SIZE)
    parts = (
        cipher.encrypt(nonce_of(base, first + index), plain[start : start + CHUNK_SIZE], None)
        for index, start in enumerate(starts)
    )
    return b"".join(parts)


def derive(secret, salt, context):
    """Derive the AES key, the base nonce of 12 bytes and the commitment of 32 as C2SP chunked encryption does."""
    size = len(secret)
    return HKDFExpand(SHA512(), size + 44, PREFIXES[size] + salt + context).derive(secret)


def open_each(key, base, sealed, first=0):
    """Open every chunk of a run on its own: its plaintext, or None where the tag is wrong."""
    cipher = AESGCM(key)
    chunks = []
    for index, start in enumerate(range(0, len(sealed), SEALED_CHUNK_SIZE)):
        chunk = sealed[start : start + SEALED_CHUNK_SIZE]
        try:
            chunks.append(cipher.decrypt(nonce_of(base, first + index), chunk, None))
        except InvalidTag:
            chunks.append(None)
    return chunks


def unseal(secret, context, message):
    """Open a message chunk by chunk, once its commitment is that of its key and context."""
    size, header = len(secret), bytes(message[:56])
    derived = derive(secret, header[:24], context)
    chunks = open_each(derived[:size], derived[size : size + 12], message[56:])
    is_whole = len(message) > 56 and len(message[56:]) % SEALED_CHUNK_SIZE >= TAG_SIZE
    if not compare_digest(derived[size + 12 :], header[24:]) or None in chunks or not is_whole:
        raise InvalidTag
    return b"".join(chunks)


def noise(size, seed=0):
    """Reproducible bytes, none of them zero: zeros are what a refused chunk leaves."""
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8)


def times(x, y):
    """Multiply in the field of NIST SP 800-38D, section 6.3, bit by bit; its first bit is the highest here."""
    product = 0
    for bit in range(127, -1, -1):
        product ^= y * (x >> bit & 1)
        y = y >> 1 ^ _REDUCTION * (y & 1)
    return product


def round_keys(key):
    """Return the round keys of FIPS 197, section 5.2, by the S-box of its section 5.1.1."""
    words = [key[i : i + 4] for i in range(0, len(key), 4)]
    count, constant = len(words), 1
    for index in range(count, 4 * (count + 7)):
        last = words[-1]
        if index % count == 0:
            last = bytes(_S_BOX[byte] for byte in last[1:] + last[:1])
            last = bytes([last[0] ^ constant]) + last[1:]
            constant = constant << 1 ^ (0x11B if constant & 0x80 else 0)
        elif count > 6 and index % count == 4:
            last = bytes(_S_BOX[byte] for byte in last)
        words.append(bytes(left ^ right for left, right in zip(words[-count], last, strict=True)))
    return [b"".join(words[start : start + 4]) for start in range(0, len(words), 4)]


def hash_key(key):
    """Return the hash key H of GCM (SP 800-38D, section 7.1)."""
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(bytes(16))


@lru_cache(64)
def kernel_state(key, nonce, call=0, message=0):
    """Return the state that the CUDA kernels read: round keys, nonce, lengths of a full chunk times H, powers of H.

    It names the call and the message that it was made for.

    Powers 1 to 513 are divided by x, and power 0 is not used. Numbers are little-endian.
    """
    h = int.from_bytes(hash_key(key))
    length, power = times(8 * CHUNK_SIZE, h), (h ^ _REDUCTION * (h >> 127)) << 1 & (1 << 128) - 1 | h >> 127
    shifted = [h]
    for _ in range(127):
        shifted.append(shifted[-1] >> 1 ^ _REDUCTION * (shifted[-1] & 1))
    numbers = [length, 0, power]
    while len(numbers) < 515:
        bits = f"{numbers[-1]:0128b}"
        numbers.append(reduce(xor, (part for bit, part in zip(bits, shifted, strict=True) if bit == "1"), 0))
    schedule = b"".join(round_keys(key)).ljust(240, b"\0")
    powers = b"".join(n.to_bytes(16, "little") for n in numbers)
    call, message = (number.to_bytes(4, "little") for number in (call, message))
    return (schedule + nonce + call + powers + message).ljust(8704, b"\0")


def _make_s_box():
    box, p, q = [0x63] * 256, 1, 1
    while True:
        p ^= p << 1 & 0xFF ^ (0x1B if p & 0x80 else 0)
        for shift in (1, 2, 4):
            q = (q ^ q << shift) & 0xFF
        q ^= 0x09 if q & 0x80 else 0
        rotated = (q << shift | q >> 8 - shift for shift in range(1, 5))
        value = q ^ 0x63
        for turn in rotated:
            value ^= turn & 0xFF
        box[p] = value
        if p == 1:
            return box


_S_BOX = _make_s_box()
