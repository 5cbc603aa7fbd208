"""Build the function that seals chunks in a buffer and opens them from there, as LLVM IR.

It moves plaintext to a device that is host memory. The buffer stays in a cache, so memory is read and written once.
The keystream is computed once: that which encrypts a block decrypts it. All else is done as by `seal` and `open` of
`gcm_ir`: one tag is computed of the ciphertext that is written to the buffer, another of that which is read from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from fastrack.format import CHUNK_SIZE
from fastrack_native.gcm_ir import (
    _VECTORS,
    Variant,
    _Chunk,
    _Hashing,
    copy,
    define_chunk,
    define_run,
    fill_zero,
)
from fastrack_native.llvm import I64, emit_loop


def reencrypt_function(module: ir.Module, variant: Variant, name: str) -> ir.Function:
    """Return the function that passes a run of chunks through a buffer; build it if needed.

    It takes `(schedule, source, target, first, count, size, buffer)`, where source and target are plaintext, and
    returns the index of the first chunk that failed authentication, or the count. The buffer has room for a sealed
    chunk, begins at a multiple of 64 bytes, and belongs to the calling thread.
    """
    chunk = define_chunk(module, variant, name, 6, _build_reencrypt)
    return define_run(module, variant, name, chunk, CHUNK_SIZE, CHUNK_SIZE)


def _build_reencrypt(function: ir.Function, variant: Variant) -> None:
    schedule, source, target, chunk, size, buffer = function.args
    work = _Reencryption(function, variant, schedule, chunk, hashes=2)
    work.run(size, source, target, buffer)
    tag_address = work.builder.add(buffer, size)
    work.small.store(work.tag(size), tag_address)
    work.finish(size, tag_address, target, number=1)


class _Reencryption(_Chunk):
    """An emitter of the code of a chunk that is sealed and opened, with a hash of each."""

    def _groups(self, groups: ir.Value, *addresses: ir.Value | None) -> None:
        builder, wide, variant, width = self.builder, self.wide, self.variant, self.variant.isa.width
        origin = self._origin()
        zeros = [wide.words(0, 0)] * _VECTORS

        # The cipher of one iteration and the two hashes of the iteration before are independent.
        def body(
            iteration: ir.Value, start: ir.Value, sealing: ir.Value, opening: ir.Value, *before: ir.Value
        ) -> list[ir.Value]:
            next_start, offset = self._next_start(origin, iteration), builder.mul(iteration, I64(variant.group))
            source, target, address = self._moved(addresses, offset)
            self._prefetch(source, target)
            hashings = self._hashings(sealing, opening, before)
            keystream = self._cipher(self._first_states(start, next_start), None, *hashings)
            sealed, text = [], []
            for lane, mask in enumerate(keystream):
                sealed.append(wide.xor(mask, wide.load(source, width * lane, once=True)))
                wide.store(sealed[lane], address, width * lane, align=width)
                text.append(wide.load(address, width * lane, align=width, once=True))
                wide.store(wide.xor(mask, text[lane]), target, width * lane)
            return [next_start, *(hashing.finish() for hashing in hashings), *sealed, *text]

        _, sealing, opening, *last = emit_loop(builder, groups, [origin, *self.hashes, *zeros, *zeros], body)
        self.hashes = [hashing.finish() for hashing in self._hashings(sealing, opening, last)]

    def _hashings(self, sealing: ir.Value, opening: ir.Value, vectors: Sequence[ir.Value]) -> list[_Hashing]:
        """Return the hashing of what was sealed, and that of what was read back."""
        parts = (sealing, vectors[:_VECTORS]), (opening, vectors[_VECTORS:])
        return [_Hashing(self.wide, self.schedule, start, text.__getitem__) for start, text in parts]

    def _blocks(self, blocks: ir.Value, counter: ir.Value, *addresses: ir.Value | None) -> None:
        builder, small = self.builder, self.small

        def body(index: ir.Value, *hashes: ir.Value) -> list[ir.Value]:
            self.hashes = list(hashes)
            source, target, address = self._moved(addresses, builder.mul(index, I64(16)))
            mask = self._keystream(builder.add(counter, index))
            sealed = small.xor(mask, small.load(source, once=True))
            small.store(sealed, address, align=16)
            self._absorb(sealed)
            text = small.load(address, align=16, once=True)
            small.store(small.xor(mask, text), target)
            self._absorb(text, 1)
            return self.hashes

        self.hashes = emit_loop(builder, blocks, self.hashes, body)

    def _last(self, size: ir.Value, number: ir.Value, *addresses: ir.Value | None) -> None:
        builder, small, (source, target, buffer) = self.builder, self.small, addresses
        scratch = builder.ptrtoint(self.scratch, I64)
        mask = self._keystream(number)
        fill_zero(builder, scratch, I64(16))
        copy(builder, scratch, source, size)
        small.store(small.xor(mask, small.load(scratch)), scratch)
        fill_zero(builder, builder.add(scratch, size), builder.sub(I64(16), size))
        self._absorb(small.load(scratch))
        copy(builder, buffer, scratch, size)
        copy(builder, scratch, buffer, size, once=True)
        text = small.load(scratch)
        self._absorb(text, 1)
        small.store(small.xor(mask, text), scratch)
        copy(builder, target, scratch, size)
        fill_zero(builder, scratch, I64(16))
