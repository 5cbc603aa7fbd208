"""Sealed tensors that somebody altered."""

import json
import math

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

import fastrack
from fastrack import SealedTensor
from fastrack._tensors import dtypes
from fastrack.format import message_size
from helpers import by_hand


def tampered(sealed, *places):
    """The same sealed tensor with one bit of its message flipped at each of these bytes."""
    message = np.frombuffer(bytes(sealed.message), np.uint8).copy()
    for place in places:
        message[place] ^= 1
    return SealedTensor(sealed.context, message, sealed.key_id)


def flip_byte(path, place=-1):
    """Flip one bit of a file, in its last byte or in another one."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def tamper_file(path, name, *places):
    """Flip one bit of that tensor's message in a sealed file, at each of these bytes."""
    with fastrack.load_file(path) as file:
        start = path.read_bytes().index(bytes(file[name].message))
        places = [start + place % file[name].message.nbytes for place in places]
    for place in places:
        flip_byte(path, place)


def rewrite_file(path, change, target=None):
    """Change a file's metadata and tensors by `change(metadata, tensors)`, at `target` or in place. Takes no key."""
    target = target or path
    target.write_bytes(by_hand.drop_guard(path.read_bytes()))
    with safe_open(target, "numpy") as file:
        metadata = file.metadata()
        tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118 - it is no mapping
    change(metadata, tensors)
    save_file(tensors, target, metadata)


def relist(path, change, target=None):
    """Change what a file lists of its sealed tensors by `change(listed, metadata)`, likewise."""

    def change_list(metadata, _):
        listed = json.loads(metadata["fastrack.tensors"])
        change(listed, metadata)
        metadata["fastrack.tensors"] = json.dumps(listed)

    rewrite_file(path, change_list, target)


def strip(path, *names):
    """Take sealed tensors out of a file, and out of its list of them."""

    def change(metadata, tensors):
        listed = json.loads(metadata["fastrack.tensors"])
        for name in names:
            del tensors[name], listed[name]
        metadata["fastrack.tensors"] = json.dumps(listed)

    rewrite_file(path, change)


def shorten_claim(path, name, count):
    """Let a sealed file say that a tensor has so many rows, with a message of that size. Takes no key."""

    def shorten(metadata, tensors):
        claims = json.loads(metadata["fastrack.tensors"])
        shape = claims[name]["shape"]
        claims[name]["shape"] = [count, *shape[1:]]
        bits = dtypes.BITS[claims[name]["dtype"]]
        tensors[name] = tensors[name][: message_size(count * math.prod(shape[1:]) * bits // 8)].copy()
        metadata["fastrack.tensors"] = json.dumps(claims)

    rewrite_file(path, shorten)
