"""Build the function that seals chunks in a buffer and opens them from there, as LLVM IR.

It moves plaintext to a device that is host memory. The buffer stays in a cache, so memory is read and written once.
The keystream is computed once: that which encrypts a block decrypts it. All else is done as by `seal` and `open` of
`gcm_ir`: one tag is computed of the ciphertext that is written to the buffer, another of that which is read from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from fastrack._crypto.cobblestone import CHUNK_SIZE
from fastrack._crypto.native.gcm_ir import (
    _VECTORS,
    Variant,
    _Chunk,
    _Hashing,
    copy,
    define_chunk,
    define_run,
    fill_zero,
)
from fastrack._crypto.native.llvm import I64, emit_loop


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
    work = _Reencryption(function, variant, schedule, chunk)
    work.run_through(source, target, size, buffer)
    tag_address = work.builder.add(buffer, size)
    work.small.store(work.tag(size), tag_address)
    work.switch()
    good = work.same(work.tag(size), work.small.load(tag_address, once=True))
    with work.builder.if_then(work.builder.icmp_unsigned("==", good, I64(0)), likely=False):
        fill_zero(work.builder, target, size)
    work.builder.ret(good)


class _Reencryption(_Chunk):
    """An emitter of the code of a chunk that is sealed and opened. `hash` is the one of sealing, until `switch`."""

    def __init__(self, function: ir.Function, variant: Variant, schedule: ir.Value, chunk: ir.Value) -> None:
        super().__init__(function, variant, schedule, chunk)
        self.other_hash = self.small.words(0, 0)

    def switch(self) -> None:
        self.hash, self.other_hash = self.other_hash, self.hash

    def run_through(self, source: ir.Value, target: ir.Value, size: ir.Value, buffer: ir.Value) -> None:
        builder, group = self.builder, I64(self.variant.group)
        groups = builder.udiv(size, group)
        self._reencrypt_groups(source, target, groups, buffer)

        done = builder.mul(groups, group)
        blocks = builder.udiv(builder.sub(size, done), I64(16))
        counter = builder.add(builder.udiv(done, I64(16)), I64(2))
        source, target, buffer = (builder.add(address, done) for address in (source, target, buffer))
        self._reencrypt_blocks(source, target, buffer, blocks, counter)
        more = builder.mul(blocks, I64(16))
        left = builder.sub(size, builder.add(done, more))
        before = builder.block, self.hash, self.other_hash
        with builder.if_then(builder.icmp_unsigned(">", left, I64(0))):
            source, target, buffer = (builder.add(address, more) for address in (source, target, buffer))
            self._reencrypt_last(source, target, buffer, left, builder.add(counter, blocks))
            within = builder.block, self.hash, self.other_hash
        self.hash, self.other_hash = (builder.phi(self.small.type) for _ in range(2))
        for block, sealing, opening in (before, within):
            self.hash.add_incoming(sealing, block)
            self.other_hash.add_incoming(opening, block)

    def _reencrypt_groups(self, source: ir.Value, target: ir.Value, groups: ir.Value, buffer: ir.Value) -> None:
        builder, wide, variant, width = self.builder, self.wide, self.variant, self.variant.isa.width
        origin = self._origin()
        zeros = [wide.words(0, 0)] * _VECTORS

        # The cipher of one iteration and the two hashes of the iteration before are independent.
        def body(
            iteration: ir.Value, start: ir.Value, sealing: ir.Value, opening: ir.Value, *before: ir.Value
        ) -> list[ir.Value]:
            blocks = builder.mul(builder.add(iteration, I64(1)), I64(variant.group // 16))
            next_start = wide.xor(origin, self._counter(blocks))
            offset = builder.mul(iteration, I64(variant.group))
            source_address, target_address, address = (builder.add(each, offset) for each in (source, target, buffer))
            self._prefetch(source_address, target_address)
            hashings = self._hashings(sealing, opening, before)
            keystream = self._cipher(self._first_states(start, next_start), None, *hashings)
            sealed, text = [], []
            for lane, mask in enumerate(keystream):
                sealed.append(wide.xor(mask, wide.load(source_address, width * lane, once=True)))
                wide.store(sealed[lane], address, width * lane, align=width)
                text.append(wide.load(address, width * lane, align=width, once=True))
                wide.store(wide.xor(mask, text[lane]), target_address, width * lane)
            return [next_start, *(hashing.finish() for hashing in hashings), *sealed, *text]

        seeds = [origin, self.hash, self.other_hash, *zeros, *zeros]
        _, sealing, opening, *last = emit_loop(builder, groups, seeds, body)
        self.hash, self.other_hash = (hashing.finish() for hashing in self._hashings(sealing, opening, last))

    def _hashings(self, sealing: ir.Value, opening: ir.Value, vectors: Sequence[ir.Value]) -> list[_Hashing]:
        """Return the hashing of what was sealed, and that of what was read back."""
        parts = (sealing, vectors[:_VECTORS]), (opening, vectors[_VECTORS:])
        return [_Hashing(self.wide, self.schedule, start, text.__getitem__) for start, text in parts]

    def _reencrypt_blocks(
        self, source: ir.Value, target: ir.Value, buffer: ir.Value, blocks: ir.Value, counter: ir.Value
    ) -> None:
        builder, small = self.builder, self.small

        def body(index: ir.Value, *hashes: ir.Value) -> list[ir.Value]:
            self.hash, self.other_hash = hashes
            offset = builder.mul(index, I64(16))
            address = builder.add(buffer, offset)
            mask = self._keystream(builder.add(counter, index))
            sealed = small.xor(mask, small.load(builder.add(source, offset), once=True))
            small.store(sealed, address, align=16)
            self._absorb(sealed)
            text = small.load(address, align=16, once=True)
            small.store(small.xor(mask, text), builder.add(target, offset))
            self._absorb_again(text)
            return [self.hash, self.other_hash]

        self.hash, self.other_hash = emit_loop(builder, blocks, [self.hash, self.other_hash], body)

    def _reencrypt_last(
        self, source: ir.Value, target: ir.Value, buffer: ir.Value, size: ir.Value, number: ir.Value
    ) -> None:
        builder, small = self.builder, self.small
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
        self._absorb_again(text)
        small.store(small.xor(mask, text), scratch)
        copy(builder, target, scratch, size)
        fill_zero(builder, scratch, I64(16))

    def _absorb_again(self, block: ir.Value) -> None:
        self.switch()
        self._absorb(block)
        self.switch()
