"""The interpreter of PTX itself: what it computes, and that it finds what it is there to find."""

import numpy as np
import pytest
from helpers.cases import each

from bench.gpu.ptx import PtxGpu, Violation

THREADS = 64
# A thread reads three double words at %rd3 into %rd5 to %rd7, their low words into %r5 to %r7. It writes one at %rd4.
# It has a word of shared memory at %r2, and another thread's at %r3.
KERNEL = """
extern .shared .align 16 .b8 memory[];
.visible .entry kernel(
    .param .u64 source,
    .param .u64 target
)
.maxntid 64, 1, 1
{{
    .reg .pred %p<2>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<16>;
    ld.param.u64 %rd0, [source];
    ld.param.u64 %rd1, [target];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd2, %r0, 24;
    add.s64 %rd3, %rd0, %rd2;
    mul.wide.u32 %rd2, %r0, 8;
    add.s64 %rd4, %rd1, %rd2;
    mov.u32 %r1, memory;
    mad.lo.s32 %r2, %r0, {stride}, %r1;
    xor.b32 %r3, %r0, {other};
    mad.lo.s32 %r3, %r3, {stride}, %r1;
    setp.ne.u32 %p0, %r0, 0;
    ld.global.nc.u64 %rd5, [%rd3];
    ld.global.nc.u64 %rd6, [%rd3+8];
    ld.global.nc.u64 %rd7, [%rd3+16];
    cvt.u32.u64 %r5, %rd5;
    cvt.u32.u64 %r6, %rd6;
    cvt.u32.u64 %r7, %rd7;
    {code}
    ret;
}}
"""
ROTATE = "st.shared.u32 [%r2], %r0; {} ld.shared.u32 %r4, [%r3];"


def run(code, blocks=1, stride=4, other=1):
    """Run one statement after another on random numbers: what was given, what was written, and the report."""
    lines = code.replace("; ", ";\n").replace(": ", ":\n")
    gpu = PtxGpu(KERNEL.format(code=lines, stride=stride, other=other), shared=lambda _: stride * THREADS)
    given = np.random.default_rng(1).integers(0, 2**64, (THREADS, 3), np.uint64)
    source, target = gpu.space.add(given.nbytes, given.tobytes()), gpu.space.add(8 * THREADS)
    gpu.launch("kernel", blocks, (source.pointer, target.pointer), None)
    return given.tolist(), target.bytes.view(np.uint64).tolist(), gpu.reports[-1][1]


@each(
    ("code", "options"),
    [
        (ROTATE.format("bar.sync 0;"), {"other": 32}),
        (ROTATE.format("bar.warp.sync -1;"), {"other": 1}),
        ("@!%p0 st.global.u32 [%rd1], %r0;", {"blocks": 1}),
        ("@!%p0 st.global.u32 [%rd1+508], %r0;", {}),
        ('@!%p0 st.global.u32 [%rd1], 7; .pragma "used_bytes_mask 15"; @!%p0 ld.global.u64 %rd5, [%rd1];', {}),
        ("@!%p0 st.global.u32 [%rd1], 7; bar.sync 0; atom.global.add.u32 %r4, [%rd1], %r0;", {}),
        ("setp.lt.u32 %p1, %r0, 32; @%p1 bra $end; bar.sync 0; $end: mov.u32 %r4, 0;", {}),
        ("@!%p0 st.global.u64 [%rd1], 7; selp.b64 %rd8, %rd0, %rd1, %p0; ld.global.u64 %rd5, [%rd8];", {}),  # of both
    ],
)
def test_what_is_allowed_passes(code, options):
    run(code, **options)


@each(
    ("code", "options", "complaint"),
    [
        (ROTATE.format(""), {"other": 32}, "a race for byte 0 of shared memory"),
        (ROTATE.format(""), {"other": 1}, "a race for byte 0 of shared memory"),
        (ROTATE.format("bar.warp.sync -1;"), {"other": 32}, "a race for byte 0 of shared memory"),
        ("st.global.u32 [%rd1], %r0;", {}, "a race for byte 0 of buffer"),
        ("@!%p0 st.global.u32 [%rd1], %r0;", {"blocks": 2}, "a race: st.global.u32 .* of block 1, with another block"),
        ("st.global.u32 [%rd3], %r0;", {}, "ld.global.nc of what is written"),
        ("setp.lt.u32 %p1, %r0, 40; @%p1 bra $end; bar.sync 0; $end: mov.u32 %r4, 0;", {}, "divergent at a barrier"),
        ("setp.lt.u32 %p1, %r0, 40; @%p1 bra $end; bar.sync 1; $end: bar.sync 0;", {}, "wait at different barriers"),
        ("setp.lt.u32 %p1, %r0, 40; @%p1 ret; bar.warp.sync -1;", {}, "a lane that has left"),
        ("@!%p0 st.global.u32 [%rd1+512], %r0;", {}, "out of bounds: .* where nothing is"),
        ("ld.global.u64 %rd5, [%rd4+8];", {}, "out of bounds: .* 8 bytes at 512 of buffer"),
        ("ld.shared.u32 %r4, [%r2+4];", {}, "out of bounds: .* of shared memory"),
        ("selp.b64 %rd8, %rd0, %rd1, %p0; ld.global.u64 %rd5, [%rd8];", {}, "byte 0 of buffer 1, .* never written"),
        ("add.s64 %rd1, %rd1, 512; selp.b64 %rd8, %rd0, %rd1, %p0; ld.global.u64 %rd5, [%rd8];", {}, "out of bounds"),
        ("@!%p0 ld.global.u32 %r4, [%rd0+2];", {}, "a misaligned access"),
        ("ld.shared.u32 %r4, [%r2];", {}, "byte 0 of shared memory, or one behind it, which was never written"),
        ("@!%p0 ld.global.u32 %r4, [%rd1];", {}, "which was never written"),
        ("@!%p0 st.global.u32 [%rd1], 7; @!%p0 ld.global.u64 %rd5, [%rd1];", {}, "which was never written"),
        (
            '@!%p0 st.global.u32 [%rd1], 7; .pragma "used_bytes_mask 0x1F"; @!%p0 ld.global.u64 %rd5, [%rd1];',
            {},
            "which was never written",
        ),
    ],
)
def test_what_is_wrong_is_a_violation(code, options, complaint):
    with pytest.raises(Violation, match=complaint):
        run(code, **options)


@each(("stride", "passes"), [(4, 1), (8, 2), (12, 1), (32, 8), (128, 32)])
def test_words_of_one_bank_are_served_one_after_another(stride, passes):
    _, _, report = run("st.shared.u32 [%r2], %r0; ld.shared.u32 %r4, [%r2];", stride=stride)
    assert [(site.requests, site.passes) for site in report.sites if "shared" in site.name] == [(2, 2 * passes)] * 2


def permute(a, b, selector):
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    nibbles = (selector >> shift & 15 for shift in (0, 4, 8, 12))
    found = (255 * (source[nibble & 7] >> 7) if nibble > 7 else source[nibble] for nibble in nibbles)
    return int.from_bytes(found, "little")


def carryless(a, b):
    product = 0
    for place in range(64):
        product ^= (a << place) * (b >> place & 1)
    return product


def look_up(a, b, c, table):
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


@each(
    ("instruction", "expected"),
    [
        ("prmt.b32 %r8, %r5, %r6, %r7;", permute),
        ("prmt.b32 %r8, %r5, %r6, 0x5140;", lambda a, b, c: permute(a, b, 0x5140)),
        ("shf.l.wrap.b32 %r8, %r5, %r6, %r7;", lambda a, b, c: (b << 32 | a) << (c & 31) >> 32),
        ("shf.r.wrap.b32 %r8, %r5, %r6, %r7;", lambda a, b, c: (b << 32 | a) >> (c & 31)),
        ("lop3.b32 %r8, %r5, %r6, %r7, 0xCA;", lambda a, b, c: look_up(a, b, c, 0xCA)),
        ("clmad.lo.u64 %rd8, %rd5, %rd6, %rd7;", lambda a, b, c: carryless(a, b) ^ c),
        ("clmad.hi.u64 %rd8, %rd5, %rd6, %rd7;", lambda a, b, c: carryless(a, b) >> 64 ^ c),
    ],
)
def test_results_are_those_of_the_ptx_isa(instruction, expected):
    bits = 64 if "u64" in instruction else 32
    widen = "cvt.u64.u32 %rd8, %r8;" if bits == 32 else ""
    given, found, _ = run(f"{instruction} {widen} st.global.u64 [%rd4], %rd8;")
    operands = [[number % 2**bits for number in numbers] for numbers in given]
    assert found == [expected(*numbers) % 2**bits for numbers in operands]
