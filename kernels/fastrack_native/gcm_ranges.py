"""Build the function that opens ranges of a chunk, as LLVM IR: all of it is authenticated, and only they are decrypted.

The ciphertext is copied to a buffer as it is hashed, by the load that it is hashed from, and decrypted from there once
the tag was compared. So the bytes that are authenticated are those that are decrypted, as in `gcm_ir`.
"""

from __future__ import annotations

from llvmlite import ir

from fastrack_native import gcm_ir
from fastrack_native.gcm_ir import _VECTORS, Variant, VectorAt, _Chunk, _Hashing, define_chunk
from fastrack_native.llvm import I8, I64, define, emit_loop, pointer


def ranges_function(module: ir.Module, variant: Variant, name: str) -> ir.Function:
    """Return the function that opens ranges of one chunk; build it if needed.

    It takes `(schedule, source, target, chunk, size, ahead, table, count, buffer)`, and returns 1 if the chunk is
    authentic, else 0. The table has `count` rows of three words: the offset of a range in the chunk, its offset in
    `target`, and its size. A range of a chunk that is not authentic is overwritten with zeros. `ahead` is the address
    of the chunk that is read next, to prefetch. The buffer has room for a chunk, and belongs to the calling thread.
    """
    collect = define_chunk(module, variant, "collect", 6, _build_collect)
    decrypt = define_chunk(module, variant, "decrypt", 6, _build_decrypt)

    def emit(function: ir.Function) -> None:
        schedule, source, target, chunk, size, ahead, table, count, buffer = function.args
        builder = ir.IRBuilder(function.append_basic_block())
        good = builder.call(collect, [schedule, source, buffer, chunk, size, ahead])
        is_good = builder.icmp_unsigned("!=", good, I64(0))

        def body(index: ir.Value) -> None:
            row = pointer(builder, builder.add(table, builder.mul(index, I64(24))))
            start, place, length = (builder.load(builder.gep(row, [I64(column)])) for column in range(3))
            destination = builder.add(target, place)
            with builder.if_else(is_good) as (then, otherwise):
                with then:
                    builder.call(decrypt, [schedule, buffer, destination, chunk, start, length])
                with otherwise:
                    gcm_ir.fill_zero(builder, destination, length)

        emit_loop(builder, count, [], body)
        builder.ret(good)

    return define(module, f"fastrack_{name}_{variant.suffix}", 9, emit, variant.isa, clears=True)


def _build_collect(function: ir.Function, variant: Variant) -> None:
    schedule, source, buffer, chunk, size, ahead = function.args
    work = _Collect(function, variant, schedule, chunk)
    work.distance = work.builder.sub(ahead, source)
    work.run(size, source, buffer)
    work.finish(size, work.builder.add(source, size), None)


def _build_decrypt(function: ir.Function, variant: Variant) -> None:
    schedule, buffer, target, chunk, start, size = function.args
    work = _Decrypt(function, variant, schedule, chunk)
    work.run_range(buffer, target, start, size)
    work.builder.ret(I64(1))


class _Collect(_Chunk):
    """An emitter of the code of a chunk that is hashed and copied as it is."""

    distance: ir.Value  # to the chunk that is read next

    def _work_group(self, start: ir.Value, next_start: ir.Value, text: VectorAt, hashing: _Hashing) -> list[ir.Value]:
        return [text(lane) for lane in range(_VECTORS)]

    def _work_block(self, text: ir.Value, number: ir.Value) -> ir.Value:
        return text

    def _prefetch(self, source: ir.Value, target: ir.Value) -> None:
        # This chunk was prefetched while the one before was hashed, which takes a tenth of the time from memory.
        ahead = self.builder.add(source, self.distance)
        for offset in range(0, self.variant.group, gcm_ir.LINE):
            self.wide.prefetch(ahead, offset, locality=2)


class _Decrypt(_Chunk):
    """An emitter of the code that decrypts a range of a chunk, whose ciphertext is in a buffer."""

    def run_range(self, buffer: ir.Value, target: ir.Value, start: ir.Value, size: ir.Value) -> None:
        """Decrypt the groups that the range touches. A group that it has a part of goes through a smaller buffer.

        The groups are read whole, whatever the size of the chunk.
        """
        builder, wide, width, group = self.builder, self.wide, self.variant.isa.width, I64(self.variant.group)
        part = builder.ptrtoint(builder.alloca(I8, self.variant.group), I64)
        stop = builder.add(start, size)
        first = builder.udiv(start, group)
        after = builder.udiv(builder.add(stop, I64(self.variant.group - 1)), group)
        origin = self._origin()

        def body(index: ir.Value, group_start: ir.Value) -> list[ir.Value]:
            low = builder.mul(builder.add(first, index), group)
            high = builder.add(low, group)
            next_start = wide.xor(origin, self._counter(builder.udiv(high, I64(16))))
            source = builder.add(buffer, low)
            text = [wide.load(source, width * lane) for lane in range(_VECTORS)]
            result = self._cipher(self._first_states(group_start, next_start), text.__getitem__)
            begin, end = self._select(">", start, low), self._select("<", stop, high)
            wanted = builder.sub(end, begin)
            place = builder.add(target, builder.sub(begin, start))
            is_whole = builder.icmp_unsigned("==", wanted, group)
            address = builder.select(is_whole, place, part)
            for lane, value in enumerate(result):
                wide.store(value, address, width * lane)
            with builder.if_then(builder.not_(is_whole)):
                gcm_ir.copy(builder, place, builder.add(part, builder.sub(begin, low)), wanted)
            return [next_start]

        seed = wide.xor(origin, self._counter(builder.mul(first, I64(self.variant.group // 16))))
        emit_loop(builder, builder.sub(after, first), [seed], body)

    def _select(self, operator: str, left: ir.Value, right: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_unsigned(operator, left, right), left, right)
