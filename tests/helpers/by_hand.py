"""Sealed files made and opened with safetensors and cryptography alone, as anyone could without fastrack."""

import json

from cryptography import cobblestone

_SEALERS = {16: cobblestone.Cobblestone128Encryptor, 32: cobblestone.Cobblestone256Encryptor}
_OPENERS = {16: cobblestone.Cobblestone128Decryptor, 32: cobblestone.Cobblestone256Decryptor}


def seal(secret, context, plain):
    sealer = _SEALERS[len(secret)](secret, context)
    return sealer.update(bytes(plain)) + sealer.finalize()


def unseal(secret, context, message):
    opener = _OPENERS[len(secret)](secret, context)
    return opener.update(bytes(message)) + opener.finalize()


def context(name, dtype, shape, file):
    """Written out letter by letter, but for what quotes and escapes a name needs."""
    quoted = json.dumps(name, ensure_ascii=False)
    extents = ",".join(map(str, shape))
    return f'fastrack/tensor@1\0{{"dtype":"{dtype}","file":"{file}","name":{quoted},"shape":[{extents}]}}'.encode()


def marks(tensors, key_id, file):
    """The metadata of a sealed file; `tensors` gives each sealed one's dtype and shape by its name."""
    listed = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in tensors.items()}
    return {
        "fastrack.version": "1",
        "fastrack.file": file,
        "fastrack.key": key_id,
        "fastrack.tensors": json.dumps(listed),
    }


def drop_guard(data):
    """The bytes of a sealed file without the entry at which other readers of safetensors refuse it."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return data if header.pop("fastrack.guard", None) is None else container(header, data[start:])


def container(header, body=b""):
    """The bytes of a safetensors file with this header, however wrong: JSON text, or what becomes it."""
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + body
