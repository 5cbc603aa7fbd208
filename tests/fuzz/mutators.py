"""Alters inputs so that they stay near to what is valid: JSON by its values, files with their lengths made right again.

Every function takes a `random.Random` and gives the same for the same seed.
"""

import io
import json
import re
import zipfile

from fastrack._tensors import dtypes
from fastrack.format import HEADER_SIZE, SEALED_CHUNK_SIZE

PREFIX = 8  # bytes of the length that a safetensors file starts with
LONGEST = 1 << 16
NUMBERS = [0, 1, -1, 2, 7, 255, 2**31, 2**32, 2**53, 2**56, 2**63 - 1, 2**64, 10**30, 1.5, -0.0, 1e400]
WORDS = ["", "0", "x", "U8", "shape", "dtype", "skeleton", "\0", "\ud800", "é", "a" * 300, *dtypes.BITS]


def mutate_bytes(data, random):
    """Flip, cut, repeat, swap or overwrite somewhere."""
    data = bytearray(data)
    here, there = sorted(random.randrange(len(data) + 1) for _ in range(2))
    kind = random.randrange(6)
    if kind == 0 and data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == 1:
        del data[here:there]
    elif kind == 2:
        data[here:here] = data[here:there][:4096]
    elif kind == 3:
        data[here:here] = random.randbytes(random.randrange(1, 9))
    elif kind == 4:
        number = random.choice([value for value in NUMBERS if isinstance(value, int)])
        data[here : here + 8] = (number % 2**64).to_bytes(8, random.choice(["little", "big"]))
    else:
        middle = (here + there) // 2
        data[here:there] = data[middle:there] + data[here:middle]
    return bytes(data)


def mutate_message(data, random):
    """Alter a message where it has a meaning: its header, its chunks, their tags, their order, its end."""
    kind = random.randrange(6)
    message = bytearray(data)
    chunks = max(1, (len(message) - HEADER_SIZE) // SEALED_CHUNK_SIZE + 1)
    if kind == 0 and message:
        message[random.randrange(min(HEADER_SIZE, len(message)))] ^= 1 << random.randrange(8)
    elif kind == 1 and message:
        end = min(HEADER_SIZE + SEALED_CHUNK_SIZE * random.randrange(1, chunks + 1), len(message))
        message[max(0, end - random.randrange(1, 17))] ^= 1 << random.randrange(8)
    elif kind == 2:
        one, other = (HEADER_SIZE + SEALED_CHUNK_SIZE * random.randrange(chunks) for _ in range(2))
        first, second = message[one : one + SEALED_CHUNK_SIZE], message[other : other + SEALED_CHUNK_SIZE]
        if len(first) == len(second):
            message[one : one + SEALED_CHUNK_SIZE], message[other : other + SEALED_CHUNK_SIZE] = second, first
    elif kind == 3:
        whole = HEADER_SIZE + SEALED_CHUNK_SIZE * random.randrange(chunks)
        del message[random.choice([whole, random.randrange(len(message) + 1)]) :]
    elif kind == 4:
        message += random.randbytes(random.choice([1, 16, SEALED_CHUNK_SIZE]))
    else:
        return mutate_bytes(data, random)
    return bytes(message)


def mutate_json(text, random):
    """Change one place of a JSON text, or the text itself if it is none."""
    tree = parse(text)
    if tree is None or random.random() < 0.1:
        return mutate_bytes(text, random)
    return write(mutate_tree(tree, random))


def mutate_any(data, random):
    """Alter JSON or anything else."""
    return (mutate_json if data.lstrip()[:1] in {b"{", b"["} else mutate_bytes)(data, random)


def behind_a_byte(mutate):
    """Return a method that alters an input in this way behind its first byte, which chooses what to do with it."""
    return staticmethod(lambda data, random: data[:1] + mutate(data[1:], random))


def mutate_tree(tree, random):
    """Change, remove, repeat or move one value of a tree, in place."""
    places = _places(tree)
    if not places or random.random() < 0.02:
        return _value(random, tree)
    holder, at = random.choice(places)
    kind = random.randrange(6)
    if kind == 0:
        del holder[at]
    elif kind == 1:
        other, there = random.choice(places)
        holder[at] = parse(write(other[there]))
    elif kind == 2 and isinstance(holder, list):
        holder.insert(at, parse(write(holder[at])))
    elif kind == 3 and isinstance(holder, dict):
        holder[random.choice(WORDS)] = holder.pop(at) if random.random() < 0.5 else parse(write(holder[at]))
    elif kind == 4 and type(holder[at]) is int:
        holder[at] += random.choice([-1, 1, 8, -holder[at] * 2, holder[at]])
    else:
        holder[at] = _value(random, holder[at])
    return tree


def mutate_file(data, random):
    """Alter a safetensors file: its header, fastrack's metadata in it, or its bytes; the header's length fits again."""
    header, body = split(data)
    tree = parse(header)
    kind = random.randrange(8)
    if not isinstance(tree, dict) or kind == 0:
        return mutate_bytes(data, random)
    if kind == 1:
        return join(header, mutate_bytes(body, random))
    if kind == 2:
        return join(mutate_bytes(header, random), body)
    marks = tree.get("__metadata__")
    if kind in {3, 4, 5} and isinstance(marks, dict) and isinstance(marks.get("fastrack.tensors"), str):
        claims = marks["fastrack.tensors"].encode(errors="surrogatepass")
        marks["fastrack.tensors"] = mutate_json(claims, random).decode(errors="replace")
    elif kind == 6:
        return _swap(tree, body, random)
    else:
        tree = mutate_tree(tree, random)
    return join(write(tree), body)


def mutate_archive(data, random):
    """Alter one file of a zip archive, and pack it again, in any way that zipfile knows."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {name: archive.read(name)[:LONGEST] for name in archive.namelist()[:8]}
    except Exception:  # noqa: BLE001 - it may be altered already, and zipfile raises many things
        return mutate_bytes(data, random)
    if not files or random.random() < 0.3:
        return mutate_bytes(data, random)
    name = random.choice(list(files))
    files[name] = mutate_array(files[name], random)
    packed = io.BytesIO()
    method = random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(packed, "w", method) as out:
        for each, content in files.items():
            out.writestr(each, content)
    return packed.getvalue()


def mutate_array(data, random):
    """Alter an .npy file: a number or a word of its header, or anything."""
    words = [found.span() for found in re.finditer(rb"[0-9]+|'[^']*'|True|False", data[:256])]
    if not words or random.random() < 0.4:
        return mutate_bytes(data, random)
    start, stop = random.choice(words)
    number = str(random.choice(NUMBERS))
    dtype = f"'{random.choice('<>|=')}{random.choice('bBiufcOSUVmM')}{number}'"
    new = random.choice([number, number, dtype, "()", "True"])
    return data[:start] + new.encode().ljust(stop - start) + data[stop:]


def split(data):
    """The header and the bytes of a safetensors file, as far as there are any."""
    size = int.from_bytes(data[:PREFIX], "little")
    return data[PREFIX : PREFIX + size], data[PREFIX + size :]


def join(header, body):
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(PREFIX, "little") + header + body


def parse(text):
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def write(tree):
    try:
        return json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
    except RecursionError:
        return b"{}"


def _swap(tree, body, random):
    """Change places: of two entries of the header, so that each tensor has the other's bytes."""
    names = [name for name, entry in tree.items() if isinstance(entry, dict) and name != "__metadata__"]
    if len(names) > 1:
        one, other = random.sample(names, 2)
        tree[one], tree[other] = tree[other], tree[one]
    return join(write(tree), body)


def _places(tree):
    """List the paths of a tree's values, without recursion, since some trees are deep."""
    found, ahead = [], [tree]
    while ahead:
        holder = ahead.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for at in keys:
            found.append((holder, at))
            ahead.append(holder[at])
    return found


def _value(random, old):
    kind = random.randrange(6)
    if kind == 0:
        return random.choice([None, True, False, [], {}, [[]], {"": {}}])
    if kind == 1:
        return random.choice(WORDS)
    if kind == 2:
        deep = old
        for _ in range(random.choice([2, 70, 300])):
            deep = [deep] if random.random() < 0.5 else {"x": deep}
        return deep
    if kind == 3:
        return str(old)[:1000]
    if kind == 4:
        return [old] * random.choice([2, 70])
    return random.choice(NUMBERS)
