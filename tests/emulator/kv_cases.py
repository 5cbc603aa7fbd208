"""KV blocks of all layouts on the emulator: ``python -m emulator emulator.kv_cases`` prints a line of JSON."""

import json
import sys

import cupy
import numpy as np
from helpers.paged import LAYOUTS, pieces_of

from emulator.__main__ import emulator
from fastrack import Key
from fastrack._devices import open_device
from fastrack._devices.paged.base import PagedBlock, Piece
from fastrack._devices.paged.cuda import CudaPages
from fastrack.format import HEADER_SIZE, SEALED_CHUNK_SIZE, message_size
from fastrack.kv import BlockContext, BlockSealer
from fastrack.kv._paged import PagedSealer

BLOCKS, TOKENS, CONTENT = 5, 16, 128
KEY = Key.from_bytes(bytes(range(32)))


class PagedCache:
    """The KV cache of one rank: groups of arrays on a device, and the blocks in them, sealed under their contexts."""

    def __init__(self, device, key, groups, rank, seed=0):
        self._random = np.random.default_rng((seed, rank))
        self.arrays, groups_of_pieces = [], []
        for layout, layers, heads, width in groups:
            outer, size = pieces_of(layout, L=layers, H=heads, N=TOKENS, C=CONTENT * width)
            array = cupy.empty((outer, BLOCKS, size), np.uint8)
            self.arrays.append(array)
            pieces = [Piece(array.data.ptr + place * BLOCKS * size, size, size) for place in range(outer)]
            groups_of_pieces.append(pieces)
        self.fill()
        self.pages = CudaPages(device.resources, groups_of_pieces, self.arrays[0], 4 * SEALED_CHUNK_SIZE)
        self.sealer = PagedSealer(self.pages, key)
        self.blocks = [PagedBlock(group, number) for number in range(BLOCKS) for group in range(len(groups))]
        layout = repr(groups)
        self.contexts = [BlockContext("m@1", layout, f"{rank}.{group}", bytes([n]), "a") for group, n in self.blocks]

    def fill(self):
        for array in self.arrays:
            array.set(self._random.integers(0, 256, array.shape, np.uint8))

    def contents(self):
        arrays = [cupy.asnumpy(array) for array in self.arrays]
        return [arrays[group][:, number].tobytes() for group, number in self.blocks]

    def store(self):
        sizes = self.pages.sizes()
        messages = [np.zeros(message_size(sizes[block.group]), np.uint8) for block in self.blocks]
        assert all(self.sealer.store(self.contexts, self.blocks, messages).result())
        return messages

    def load(self, messages, contexts=None):
        """Load blocks into other bytes, and return which are open, and which hold zeros."""
        self.fill()
        is_open = self.sealer.load(contexts or self.contexts, self.blocks, messages).result()
        return is_open, [not any(content) for content in self.contents()]


def faults(caches, stored, foreign, random):
    """Yield what a store or another server may do: its name, a cache, messages, contexts, and the blocks to miss."""
    cache, messages = caches[0], stored[0]
    last = len(messages) - 1
    second = next(n for n in range(1, len(messages)) if cache.blocks[n].group == cache.blocks[0].group)

    def altered(number, place):
        message = messages[number].copy()
        message[place] ^= 1 << int(random.integers(8))
        return message

    for name, bad in (("first", [0]), ("middle", [last // 2]), ("every", [*range(len(messages))])):
        for what, place in (("header", 5), ("commitment", 40), ("ciphertext", HEADER_SIZE + 3), ("tag", -1)):
            yield (
                f"{what} of the {name}",
                [altered(n, place) if n in bad else each for n, each in enumerate(messages)],
                cache.contexts,
                bad,
            )
        cut = [each.copy() if n in bad else each for n, each in enumerate(messages)]
        for number in bad:
            cut[number][cut[number].size // 2 :] = 0
        yield f"cut, the {name}", cut, cache.contexts, bad
    swapped = list(messages)
    swapped[0], swapped[second] = swapped[second], swapped[0]
    yield "swapped", swapped, cache.contexts, [0, second]
    yield "one of another key", [*foreign[:1], *messages[1:]], cache.contexts, [0]
    everything = [*range(len(messages))]
    for name, new in (("tenant", {"salt": "b"}), ("weights", {"model": "m@2"}), ("layout", {"layout": "other"})):
        yield f"other {name}", messages, [each._replace(**new) for each in cache.contexts], everything
    for rank, others in enumerate(stored[1:], 1):
        yield f"rank {rank}", others, cache.contexts, everything


def opens_on_the_host(cache, messages):
    """Return whether each message says what its block holds, by the sealer that knows no device."""
    sealer, right = BlockSealer(KEY), []
    for context, content, message in zip(cache.contexts, cache.contents(), messages, strict=True):
        opened = np.empty(len(content), np.uint8)
        right.append(sealer.open(context, message, opened) and opened.tobytes() == content)
    return right


def run(device, number, groups, ranks):
    """Store the blocks of ranks, load them, and load what was done to them. Return what is wrong."""
    wrong, random = [], np.random.default_rng(number)
    caches = [PagedCache(device, KEY, groups, rank, number) for rank in range(ranks)]
    stored = [cache.store() for cache in caches]
    foreign = PagedCache(device, Key.generate(), groups, 0, number).store()
    contents = [cache.contents() for cache in caches]
    if not all(all(opens_on_the_host(*each)) for each in zip(caches, stored, strict=True)):
        wrong.append("what was sealed does not open on the host")
    if any(text[:64] in message.tobytes() for text in contents[0] for message in stored[0]):
        wrong.append("a message has plaintext")
    for cache, messages, content in zip(caches, stored, contents, strict=True):
        is_open, _ = cache.load(messages)
        if not all(is_open) or cache.contents() != content:
            wrong.append("stored and loaded is not equal")
    cases = 0
    for name, messages, contexts, bad in faults(caches, stored, foreign, random):
        cases += 1
        is_open, is_cleared = caches[0].load(messages, contexts)
        missed = [n for n, each in enumerate(is_open) if not each]
        others = [n for n in range(len(messages)) if n not in bad]
        now = caches[0].contents()
        if missed != sorted(bad) or not all(is_cleared[n] for n in bad):
            wrong.append(f"{name}: missed {missed}, not {bad}")
        if [now[n] for n in others] != [contents[0][n] for n in others]:
            wrong.append(f"{name}: other blocks changed")
    return cases, wrong


def main():
    """Run every layout in two dtypes, with one head and four, two groups of other sizes, and one to four ranks.

    Of these, the argument says which to begin with, and how many to go on by.
    """
    device, found, cases = open_device("cuda:0"), {}, 0
    start, step = map(int, sys.argv[1:3])
    combined = [(layout, width, heads) for layout in LAYOUTS for width in (1, 2) for heads in (1, 4)]
    for number, (layout, width, heads) in [*enumerate(combined)][start::step]:
        groups = [(layout, 3, heads, width), (layout, 2, heads, 2 * width)]
        count, wrong = run(device, number, groups, 1 + number % 4)
        cases += count
        if wrong:
            found[f"{layout} {width} {heads}"] = wrong
    device.close()
    sys.stdout.write(json.dumps({"wrong": found, "cases": cases, "violations": emulator.violations}) + "\n")


if __name__ == "__main__":
    main()
