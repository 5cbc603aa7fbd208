"""Files made of pieces of several sealed files, read by fastrack and by a reader of docs/format.md beside it.

The pieces are tokens of JSON, marks, chunks, tags and whole messages, so that much of what is made nearly opens.
"""

import json
import re
from collections import defaultdict

import numpy as np
from helpers import reference
from helpers.by_hand import RefusedError, described, sealed

import fastrack
from fastrack import AuthenticationError, FormatError, Key, UnknownKeyError
from fuzz.common import FOLDER, attempt, require, same_salts
from fuzz.mutators import join, parse, split, write

SECRETS = [bytes(range(32)), bytes(range(1, 33)), bytes(range(16))]
KEYS = [Key.from_bytes(secret) for secret in SECRETS]
HEADER_SIZE = 56
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+|[{}\[\],:]|true|false|null')
MEMBER = re.compile(r'"(?:[^"\\]|\\.)*":(?:\{[^{}]*\}|\[[^\[\]]*\]|"(?:[^"\\]|\\.)*")')
BLANKS = [" ", "\n", "\t", "\u00a0", "\0", "/**/", "\ufeff"]
LENGTHS = [16, 24, 32, HEADER_SIZE, 72, 1, 7, 16384, 16400]


class Recombined:
    """`load_file` and `to_device` of such files: what they open is what its owner sealed, and what the format gives."""

    name = "recombined"

    def __init__(self):
        self._path = FOLDER / "recombined.safetensors"
        self._sealed = defaultdict(set)  # by file id and name: each dtype, shape and content
        with same_salts():
            self._files = self._make_files()

    def _make_files(self):
        made = [
            self._make(tensors(1), KEYS[0], metadata={"note": "é", "format": "np"}),
            self._make(tensors(1), KEYS[0]),  # sealed again: other messages of the same
            self._make(tensors(2), KEYS[1], plain=["b"]),
            self._make(tensors(3), KEYS[2]),
        ]
        moved = {name: fastrack.seal(array, KEYS[0], name=name) for name, array in tensors(4).items()}
        return [*made, self._make({**tensors(4), "a": moved["a"], "z": moved["z"]}, KEYS[0], known=tensors(4))]

    def _make(self, contents, key, known=None, **options):
        fastrack.save_file(contents, self._path, key, **options)
        with fastrack.load_file(self._path) as file:
            for name in file:
                array = (known or contents)[name]
                self._sealed[file.file_id, name].add((file[name].dtype, array.shape, array.tobytes()))
        return self._path.read_bytes()

    def seeds(self):
        return list(self._files)

    def mutate(self, data, random):
        """Put a piece of another of the files into this one, or change one token or bit."""
        header, body = split(data)
        other_header, other_body = split(random.choice(self._files))
        text, other_text = header.decode(errors="replace"), other_header.decode()
        kind = random.randrange(9)
        if kind < 3:
            text = _mutate_claims(text, other_text, random)
        elif kind < 5:
            text = _mutate_text(text, other_text, random)
        elif kind == 5:
            text = _move_mark(text, other_text, random)
        elif kind == 6:
            body = _move_piece(body, other_body, random)
        elif kind == 7:
            body = _move_message(text, body, other_text, other_body, random)
        elif body:
            at = random.randrange(len(body))
            body = body[:at] + bytes([body[at] ^ 1 << random.randrange(8)]) + body[at + 1 :]
        return join(text.encode(errors="replace"), body)

    def run(self, data):
        self._path.write_bytes(data)
        file = attempt(lambda: fastrack.load_file(self._path), FormatError)
        who = "only the other reader" if file is None else "only fastrack"
        require(is_taken_by_format(data) == (file is not None), f"{who} takes the file for one of the format")
        if file is not None:
            with file:
                for name in file:
                    self._compare(file, name)

    def _compare(self, file, name):
        refusals = AuthenticationError, UnknownKeyError
        array = attempt(lambda: fastrack.to_device(file[name], keys=KEYS, framework="numpy"), *refusals)
        found = None if array is None else (file[name].dtype, array.shape, array.tobytes())
        require(found is None or found in self._sealed[file.file_id, name], f"{name!r} opened to what nobody sealed")
        expected = read_by_format(self._path, name)
        who = "only fastrack" if expected is None else "only the other reader" if found is None else "each"
        require(found == expected, f"the two readers differ on {name!r}, which {who} opened")


def tensors(seed):
    """Small ones, of which two have the same shape, and one with a whole last chunk."""
    random = np.random.default_rng(seed)
    return {
        "a": random.integers(0, 9, (3, 4)).astype(np.float32),
        "b": random.integers(0, 9, (3, 4)).astype(np.float32),
        'é"\\': random.integers(0, 99, 2100),
        "none": np.zeros((0, 3), np.int32),
        "z": np.array(seed, np.float64),
        "bytes": random.integers(0, 256, 16384, np.uint8),
    }


# The other reader: `helpers.by_hand`, chunk by chunk, with the AES-GCM and HKDF of pyca/cryptography.


def read_by_format(path, name):
    """Open a tensor: its dtype, shape and content, or None."""
    try:
        return _open(path.read_bytes(), name)
    except RefusedError:
        return None


def is_taken_by_format(content):
    """Return whether a file has the form of one in which something is sealed, or nothing."""
    try:
        described(sealed.parse)(content)
    except RefusedError:
        return False
    return True


@described
def _open(content, name):
    file = sealed.parse(content)
    opened = sealed.open_one(file, name, SECRETS, "tensor", reference)
    claim, _ = file.sealed[name]
    return claim["dtype"], tuple(claim["shape"]), opened


# What is altered.


def _mutate_claims(text, other, random):
    """Alter the text of `fastrack.tensors`, which is text within the header's."""
    tree, other_claims = parse(text), json.loads(other)["__metadata__"]["fastrack.tensors"]
    marks = tree.get("__metadata__") if isinstance(tree, dict) else None
    claims = marks.get("fastrack.tensors") if isinstance(marks, dict) else None
    if not isinstance(claims, str):
        return _mutate_text(text, other, random)
    marks["fastrack.tensors"] = _mutate_text(claims, other_claims, random)
    return write(tree).decode()


def _mutate_text(text, other, random):
    """Alter, exchange, repeat or leave out a token of JSON, or put in one of another text."""
    tokens = [found.span() for found in TOKEN.finditer(text)]
    kind = random.randrange(7)
    if kind == 5 or not tokens:
        return other
    start, stop = random.choice(tokens)
    token = text[start:stop]
    if kind == 1:
        return _exchange(text, *sorted([(start, stop), random.choice(tokens)]))
    if kind == 3:
        at = text.find("{", random.randrange(len(text))) + 1 or text.find("{") + 1
        return text[:at] + random.choice(MEMBER.findall(other) or ['"x":"y"']) + "," + text[at:]
    if kind == 0:
        token = random.choice(TOKEN.findall(other))
    elif kind == 2:
        token = _respelt(token, random)
    elif kind == 4:
        token = random.choice(BLANKS) + token
    else:
        token = ""
    return text[:start] + token + text[stop:]


def _exchange(text, first, second):
    if first[1] > second[0]:
        return text
    between = text[first[1] : second[0]]
    return text[: first[0]] + text[slice(*second)] + between + text[slice(*first)] + text[second[1] :]


def _respelt(token, random):
    """Return another spelling of a token, which some readers may take for the same, or for a near number."""
    if len(token) > 2 and token[0] == '"' and token[1] != "\\":
        return f'"\\u{ord(token[1]):04x}' + token[2:]
    if token.lstrip("-").isdecimal():
        number = int(token)
        near = [str(number + 2**64), str(number ^ 1), str(-number)]
        return random.choice([f"{token}.0", f"{token}e0", f"0{token}", f"-{token}", f"+{token}", *near])
    return token


def _move_mark(text, other, random):
    tree, marks = parse(text), json.loads(other)["__metadata__"]
    if not isinstance(tree, dict) or not isinstance(tree.get("__metadata__"), dict):
        return other
    mark = random.choice(sorted(marks))
    tree["__metadata__"][mark] = marks[mark]
    return write(tree).decode()


def _move_piece(body, other, random):
    size = random.choice(LENGTHS)
    at, there = random.randrange(len(body) + 1), random.randrange(len(other))
    piece = other[there : there + size][: len(body) - at]
    return body[:at] + piece + body[at + len(piece) :]


def _move_message(text, body, other_text, other_body, random):
    """Put a whole message of the other file in the place of one of this, under whatever name."""
    tree, other = parse(text), json.loads(other_text)
    entries = tree.values() if isinstance(tree, dict) else ()
    places = [entry.get("data_offsets") for entry in entries if isinstance(entry, dict)]
    places = [place for place in places if isinstance(place, list) and [*map(type, place)] == [int, int]]
    del other["__metadata__"]
    start, stop = random.choice(sorted(entry["data_offsets"] for entry in other.values()))
    fitting = [place for place in places if place[0] >= 0 and place[1] - place[0] == stop - start]
    if not fitting:
        return body
    at = random.choice(fitting)[0]
    return body[:at] + other_body[start:stop] + body[at + stop - start :]
