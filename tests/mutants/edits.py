"""Mutants of the kernels: what to break, and the tests that notice.

Some changes alter no result, and so are no mutants:

- A lane that reads another lane's copy of a table gets the same entry. Only measurements show bank conflicts.
- `carryless` may take an XOR for any of its sums: what a column holds above its lowest bit is masked away.
- `seal` may use one side for all chunks: with two barriers a chunk no write of the next meets a read of this one.
- `seal` may store 16 bytes for a short last block: what follows the text is zeros, and the tag takes their place later.
- A thread may encrypt blocks that do not exist, as it stores none of them.
- A comparison of tags that ends early gives the same verdict. Only the machine code shows that it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from mutants.nests import NESTS


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of the kernels."""

    name: str
    file: str
    old: str  # a text that the file has once
    new: str
    breaks: str
    tests: tuple[str, ...]  # that notice, as pytest names them in tests/kernels


_CHUNKS, _GATHER, _GHASH, _BUILD = (f"test_cu_{name}.py::test_" for name in ("chunks", "gather", "ghash", "build"))
_LAST = _CHUNKS + "a_last_chunk_of_any_length_opens_and_seals"
_RUN = _CHUNKS + "a_run_of_chunks_opens_and_seals_under_any_number"
_TAG = _CHUNKS + "every_byte_of_a_tag_counts_and_of_one_every_bit"
_FULL = _CHUNKS + "a_byte_at_any_place_of_a_full_chunk_counts"
_LOWEST = _CHUNKS + "the_lowest_bad_number_is_reported_whatever_the_order"
_LARGE = _CHUNKS + "a_chunk_of_a_run_above_4_gib_is_whole"
_FAR = _CHUNKS + "a_chunk_beyond_4_gib_of_a_run_is_where_it_belongs"
_SECRETS = _CHUNKS + "no_kernel_leaves_a_secret_in_shared_memory"
_WIPED = _CHUNKS + "all_shared_memory_but_the_tables_is_wiped"
_BITS = _GHASH + "single_bits_are_multiplied"
_ONES = _GHASH + "words_full_of_ones_carry_nothing_into_each_other"
_ALIGNED = _GATHER + "any_alignment_of_source_and_target_is_copied"
_PIECES = _GATHER + "a_chunk_may_have_few_pieces_or_many"
_ALONE = _GATHER + "what_no_piece_names_is_left_alone"
_ORDER = _GATHER + "the_order_of_the_chunks_is_free_and_the_lowest_bad_one_reported"
_WHOLE = _GATHER + "a_chunk_of_any_number_and_far_from_the_end_is_whole"
_LENGTHS = _GATHER + "a_last_chunk_of_any_length_is_gathered"
_OUTSIDE = _GATHER + "a_plan_that_reaches_outside_is_reported_and_writes_nowhere_else"
_BOUNDS = _GATHER + "a_piece_may_reach_a_bound_and_no_further"
_ALTERED = _GATHER + "a_plan_that_was_altered_is_not_read_and_the_result_is_zeros"
_GATHER_FAR = _GATHER + "pieces_beyond_4_gib_are_where_they_belong"
_REGISTERS = _BUILD + "every_kernel_is_there_and_two_blocks_share_a_multiprocessor"


def _all(file, *mutants):
    return [Mutant(name, file, old, new, breaks, tests) for name, old, new, breaks, *tests in mutants]


def _make():
    return [
        *_all("aes.cuh", *_TABLES, *_ROUNDS, *_COUNTERS),
        *_all("ghash.cuh", *_PRODUCTS),
        *_all("chunk.cuh", *_STAGES, *_BLOCKS, *_TAGS, *_OPENING, *_SEALING, *_COPIES),
        *_all("plan.cuh", *_PLANS),
        *_all("fastrack.cu", *_RUNS, *_GATHERS),
        *(Mutant(*mutant[:5], mutant[5:]) for mutant in NESTS),
    ]


# Each is: name, old, new, what it breaks, the tests that notice.

_TABLES = (
    ("reduction-of-mix-columns", "* 0x11b;", "* 0x11d;", "MixColumns doubles modulo another polynomial", _LAST),
    ("coefficient-of-mix-columns", "(s2 ^ s) << 24", "s2 << 24", "MixColumns has 2 in place of 3", _LAST),
    ("second-table-as-first", "        entry = rotate_8(entry);\n", "", "T1 is not rotated", _LAST),
    ("first-of-the-s-box", "0x63, 0x7c, 0x77", "0x62, 0x7c, 0x77", "S-box: the entry of 0", _RUN),
    ("last-of-the-s-box", "0x54, 0xbb, 0x16,", "0x54, 0xbb, 0x17,", "S-box: the entry of 255", _RUN),
    ("lanes-without-a-table", "i < 8; ++i) {", "i < 7; ++i) {", "four lanes lack an entry of the tables", _LAST),
    ("entry-of-both-tables", "threadIdx.x >= 256", "threadIdx.x > 256", "T1 lacks its entry of 0", _LAST),
    ("byte-of-a-column", "<< 8 * BYTE, lane)", "<< 8 * (BYTE ^ 1), lane)", "a lookup takes another byte", _LAST),
)

_ROUNDS = (
    (
        "rows-swapped",
        "rotate_16(t.at<T0, 2>(c) ^ t.at<T1, 3>(d))",
        "rotate_16(t.at<T0, 2>(d) ^ t.at<T1, 3>(c))",
        "ShiftRows",
        _LAST,
    ),
    ("rounds-without-keys", "t.at<T1, 1>(b) ^ key ^", "t.at<T1, 1>(b) ^", "AddRoundKey", _LAST),
    ("upper-rows-rotated-by-8", "^ key ^ rotate_16(", "^ key ^ rotate_8(", "T2 and T3", _LAST),
    ("last-round-without-key", "0x7610) ^ key;", "0x7610);", "AddRoundKey of the last round", _LAST),
    ("last-round-mixes", "0x0051", "0x0050", "the last round takes 2s in place of s", _LAST),
    ("last-round-rows-swapped", "0x5100", "0x1500", "ShiftRows of the last round", _LAST),
    (
        "columns-of-a-round-swapped",
        "mix(t, s.z, s.w, s.x, s.y, k.z)",
        "mix(t, s.z, s.w, s.y, s.x, k.z)",
        "the third column of a round",
        _LAST,
    ),
    (
        "key-of-the-last-column",
        "last(t, s.w, s.x, s.y, s.z, k.w)",
        "last(t, s.w, s.x, s.y, s.z, k.x)",
        "the key of the last column",
        _LAST,
    ),
    (
        "tag-one-round-short",
        "counter);\n#pragma unroll\n    for (int round = 3;",
        "counter);\n#pragma unroll\n    for (int round = 4;",
        "the block that hides the tag has a round less",
        _LAST,
    ),
    (
        "text-one-round-short",
        "round < Aes<BITS>::ROUNDS; ++round) {",
        "round < Aes<BITS>::ROUNDS - 1; ++round) {",
        "keystream has a round less",
        _LAST,
    ),
    (
        "second-block-follows-the-first",
        "s.b = full_round(t, s.b, k);",
        "s.b = full_round(t, s.a, k);",
        "the second of two blocks",
        _RUN,
    ),
    (
        "second-block-is-the-first",
        "last_round(t, s.b, k)};",
        "last_round(t, s.a, k)};",
        "both blocks have one keystream",
        _RUN,
    ),
    ("rounds-of-aes-256", "KEY_WORDS = BITS / 32", "KEY_WORDS = 4", "AES-256 has the rounds of AES-128", _LAST),
    ("rounds-of-both", "KEY_WORDS + 6", "KEY_WORDS + 5", "a round less, of each size of key", _LAST),
    ("schedule-without-its-end", "4 * (ROUNDS + 1)", "4 * ROUNDS", "the last round key is not loaded", _LAST),
)

_COUNTERS = (
    (
        "key-of-the-first-column",
        "rotate_16(t.at<T0, 2>(s2)) ^ k1.x;",
        "rotate_16(t.at<T0, 2>(s2));",
        "round 1: the key of column 0",
        _LAST,
    ),
    (
        "key-of-the-second-column",
        "rotate_16(t.at<T1, 3>(s0)) ^ k1.y;",
        "rotate_16(t.at<T1, 3>(s0)) ^ k1.z;",
        "round 1: the key of column 1",
        _LAST,
    ),
    (
        "third-column-of-round-1",
        "mix(t, s2, s3, s0, s1, k1.z)",
        "mix(t, s2, s0, s3, s1, k1.z)",
        "round 1: the rows of column 2",
        _LAST,
    ),
    (
        "fourth-column-of-round-1",
        "mix(t, s3, s0, s1, s2, k1.w)",
        "mix(t, s3, s0, s1, s2, k1.z)",
        "round 1: the key of column 3",
        _LAST,
    ),
    (
        "third-column-of-round-2",
        "t.at<T1, 1>(c3) ^ k2.z;",
        "t.at<T1, 1>(c3) ^ k1.z;",
        "round 2: the key of column 2",
        _LAST,
    ),
    ("nonce-without-whitening", "n2 ^ k0.z", "n2", "round 0: the last word of the nonce", _LAST),
    (
        "counter-without-whitening",
        "swap_bytes(counter) ^ schedule[3]",
        "swap_bytes(counter)",
        "round 0: the key of the counter",
        _LAST,
    ),
    ("counter-little-endian", "swap_bytes(counter) ^", "counter ^", "the counter's byte order", _LAST),
    (
        "counter-of-8-bits",
        "swap_bytes(counter) ^",
        "swap_bytes(counter & 0xff) ^",
        "the counter's carry: keystream repeats after 4 KiB",
        _RUN,
    ),
    (
        "counter-of-10-bits",
        "swap_bytes(counter) ^",
        "swap_bytes(counter & 0x3ff) ^",
        "the counter's carry: the last two blocks of a full chunk",
        _RUN,
    ),
    (
        "counter-in-the-second-column",
        "made.first[1] ^ rotate_16(t.at<T0, 2>(s3))",
        "made.first[1] ^ t.at<T0, 2>(s3)",
        "round 1: the counter's part of column 1",
        _LAST,
    ),
    (
        "counter-in-the-fourth-column",
        "t.at<T1, 1>(r0) ^ rotate_16(t.at<T0, 2>(r1))",
        "t.at<T1, 1>(r1) ^ rotate_16(t.at<T0, 2>(r0))",
        "round 2: the counter's part of column 3",
        _LAST,
    ),
)

_PRODUCTS = (
    (
        "missing-product",
        "halves(multiply(x2, y3) + multiply(x0, y1))",
        "halves(multiply(x2, y3))",
        "bits at 0 times bits at 1",
        _BITS,
    ),
    (
        "column-that-overflows",
        "+ multiply(x0, y0)) ^ halves(multiply(x2, y2))",
        "+ multiply(x0, y0) + multiply(x2, y2))",
        "a column sums more than 15 and carries into the next",
        _ONES,
    ),
    ("multiplication-of-32-bits", "static_cast<u64>(a) * b", "static_cast<u64>(a * b)", "the upper halves", _BITS),
    ("mask-with-a-hole", "m3 = 0x88888888", "m3 = 0x80888888", "a bit of the products", _BITS),
    ("middle-of-two-words", "b0 ^ b1) ^ low ^ high", "b0 ^ b1) ^ low", "Karatsuba of double words", _BITS),
    ("middle-of-four-words", "low.w[i] ^ high.w[i]", "low.w[i]", "Karatsuba of blocks", _BITS),
    (
        "overflow-of-the-reduction",
        "p0 << 31 ^ p0 << 30 ^ p0 << 25",
        "p0 << 31 ^ p0 << 30",
        "x^7 of the overflow",
        _BITS,
    ),
    ("polynomial", "p[i + 1], 7)", "p[i + 1], 6)", "the reduction takes x^6 for x^7", _BITS),
    (
        "word-left-unreduced",
        "i < 4; ++i) {\n        r.w[i] ^=",
        "i < 3; ++i) {\n        r.w[i] ^=",
        "the reduction of the highest word",
        _BITS,
    ),
    ("sum-of-three-words", "i < 4; ++i) a.w[i] ^=", "i < 3; ++i) a.w[i] ^=", "Horner's rule: the highest word", _RUN),
    ("byte-order-of-a-block", "return {{swap_bytes(block.w)", "return {{block.w", "the last word of a block", _BITS),
    ("byte-order-of-a-tag", "swap_bytes(a.w[0]));", "a.w[0]);", "the last word of a result", _BITS),
    (
        "warp-sums-three-words",
        "i < 4; ++i) a.w[i] = __reduce",
        "i < 3; ++i) a.w[i] = __reduce",
        "the sum over a warp: the highest word",
        _LAST,
    ),
)

_STAGES = (
    (
        "tables-without-barrier",
        "state->schedule[threadIdx.x];\n    __syncthreads();",
        "state->schedule[threadIdx.x];",
        "chunks are opened before tables and keys are there",
        _LAST,
    ),
    (
        "wipe-without-barrier",
        "    __syncthreads();\n    u32* secrets",
        "    u32* secrets",
        "keys are wiped while others read them",
        _LAST,
    ),
    (
        "no-wipe",
        "i += THREADS) secrets[i] = 0;",
        "i += THREADS) secrets[i] ^= 0;",
        "round keys stay in shared memory",
        _SECRETS,
    ),
    (
        "wipe-of-the-schedule-only",
        "(sizeof(Shared) - TABLE_BYTES) / 4",
        "sizeof(shared->schedule) / 4",
        "sums and keystream starts stay in shared memory",
        _WIPED,
    ),
    (
        "number-little-endian",
        "^ swap_bytes(static_cast<u32>(number >> 32))",
        "^ static_cast<u32>(number >> 32)",
        "nonce: byte order of the number's upper half",
        _RUN,
    ),
    (
        "number-of-32-bits",
        "state->nonce[1] ^ swap_bytes(static_cast<u32>(number >> 32)),",
        "state->nonce[1],",
        "nonce: the number's upper half",
        _RUN,
    ),
    (
        "number-in-the-wrong-word",
        "state->nonce[0],\n",
        "state->nonce[0] ^ static_cast<u32>(number),\n",
        "nonce: the number goes into the first word as well",
        _RUN,
    ),
    ("number-added", "state->nonce[2] ^ swap_bytes", "state->nonce[2] + swap_bytes", "nonce: a sum for the XOR", _RUN),
    (
        "nonce-without-number",
        "state->nonce[2] ^ swap_bytes(static_cast<u32>(number)));",
        "state->nonce[2]);",
        "nonce: the number's lower half",
        _RUN,
    ),
    (
        "warp-without-barrier",
        "shared->chunk[side].length = length;\n    }\n    __syncwarp();",
        "shared->chunk[side].length = length;\n    }",
        "a chunk's start is read before it is there",
        _LAST,
    ),
    (
        "length-left-alone",
        "        shared->chunk[side].length = length;\n",
        "",
        "the lengths block and the target have another chunk's length",
        _LAST,
    ),
    ("length-in-bytes", "{{8 * length, 0, 0, 0}}", "{{length, 0, 0, 0}}", "lengths block: bytes for bits", _LAST),
    (
        "length-of-associated-data",
        "{{8 * length, 0, 0, 0}}",
        "{{0, 0, 8 * length, 0}}",
        "lengths block: its halves swapped",
        _LAST,
    ),
    (
        "length-always-full",
        "if (length != CHUNK) lengths",
        "if (length > CHUNK) lengths",
        "lengths block: that of a full chunk for all",
        _LAST,
    ),
    (
        "length-never-full",
        "load_field(state->length_of_full)",
        "load_field(state->nonce)",
        "lengths block: that of a full chunk",
        _RUN,
    ),
    ("power-of-the-lengths", "state->powers[1]", "state->powers[2]", "lengths block: H^2 for H", _LAST),
    (
        "counter-of-the-tag",
        "chunk[side].start, 1);",
        "chunk[side].start, 2);",
        "the tag is hidden by keystream of the text",
        _LAST,
    ),
    ("tag-without-lengths", "claimed ^ from_field(lengths) ^ hidden", "claimed ^ hidden", "lengths block", _LAST),
    ("tag-not-hidden", "from_field(lengths) ^ hidden", "from_field(lengths)", "a tag shows its GHASH", _LAST),
    ("tag-not-compared", "claimed ^ from_field", "from_field", "the claimed tag", _LAST),
)

_BLOCKS = (
    (
        "last-block-forgotten",
        "(length + 15) / 16",
        "length / 16",
        "blocks of a length that is no multiple of 16",
        _LAST,
    ),
    ("block-too-many", "(length + 15) / 16", "(length + 16) / 16", "blocks of a multiple of 16", _LAST),
    ("last-block-of-zero-bytes", "(length - 1) % 16 + 1", "length % 16", "the last block of a multiple of 16", _LAST),
    ("first-block-short", "i == 1 && threadIdx.x", "i == 0 && threadIdx.x", "the block that is short", _LAST),
    ("short-for-all-threads", "i == 1 && threadIdx.x == THREADS - 1 ?", "i == 1 ?", "blocks before a short one", _LAST),
    (
        "first-bytes-are-all",
        "if (size == 16) return block;",
        "if (size <= 16) return block;",
        "the tag is hashed with a short block",
        _LAST,
    ),
    ("first-bytes-and-one", "kept >= 4 ?", "kept >= 3 ?", "a byte after a short block", _LAST),
    ("first-bytes-of-a-word", "(1u << 8 * kept) - 1", "(1u << 4 * kept) - 1", "half of the last bytes", _LAST),
    (
        "byte-of-the-wrong-word",
        "i & 4 ? block.w : block.z",
        "i & 4 ? block.z : block.z",
        "the last four bytes at an odd place",
        _LAST,
    ),
    (
        "byte-set-nowhere",
        "word == 3 ? bits : 0",
        "word == 4 ? bits : 0",
        "the last four bytes from an odd place",
        _LAST,
    ),
    ("load-misaligned", "& 15) == 0) return", "& 7) == 0) return", "a load of 16 bytes at a multiple of 8", _LAST),
    ("load-too-long", "i < size; ++i) set_byte", "i < 16; ++i) set_byte", "a load past the end of the source", _LAST),
    ("store-misaligned", "& 15) == 0) {", "& 7) == 0) {", "a store of 16 bytes at a multiple of 8", _LAST),
    ("store-too-long", "i < size; ++i) place[i]", "i < 16; ++i) place[i]", "a store past the end of the target", _LAST),
    (
        "store-of-16-for-fewer",
        "if (size == 16 && (reinterpret_cast<u64>(place) & 15) == 0) {",
        "if ((reinterpret_cast<u64>(place) & 15) == 0) {",
        "a store past the end of the target, where aligned",
        _LAST,
    ),
)

_TAGS = (
    ("second-block-not-hashed", "sum = sum ^ second;", "sum = sum;", "half of a chunk is not authenticated", _FULL),
    (
        "first-block-not-hashed",
        "Field sum = first;",
        "Field sum = {{0, 0, 0, 0}};",
        "half of a chunk is not authenticated",
        _FULL,
    ),
    ("power-of-a-thread", "THREADS + 1 - threadIdx.x", "THREADS - threadIdx.x", "H^1 to H^512 for H^2 to H^513", _LAST),
    ("power-of-horner", "i == 0 ? THREADS :", "i == 0 ? THREADS - 1 :", "H^511 for H^512", _RUN),
    (
        "sums-of-one-side",
        "store_field(shared->sums[side]",
        "store_field(shared->sums[0]",
        "sums of the second chunk of a block",
        _RUN,
    ),
    ("sum-of-15-warps", "lane < WARPS)", "lane < WARPS - 1)", "the last warp, which has the last block", _LAST),
    ("sum-without-rest", "^ shared->chunk[side].rest;", ";", "lengths, keystream and claimed tag", _LAST),
    ("first-word-of-a-tag", "difference.x | difference.y |", "difference.y |", "32 bits of a tag", _TAG),
    ("second-word-of-a-tag", "difference.x | difference.y |", "difference.x |", "32 bits of a tag", _TAG),
    ("third-word-of-a-tag", "| difference.z |", "|", "32 bits of a tag", _TAG),
    ("fourth-word-of-a-tag", "difference.z | difference.w;", "difference.z;", "32 bits of a tag", _TAG),
    (
        "words-of-a-tag-all-wrong",
        "difference.x | difference.y | difference.z | difference.w",
        "difference.x & difference.y & difference.z & difference.w",
        "a tag is right unless each word is wrong",
        _TAG,
    ),
    ("bit-of-a-tag", "(any | (0 - any)) >> 31", "any >> 31", "all bits of a tag but the highest", _TAG),
    (
        "lower-half-of-a-tag",
        "(any | (0 - any))",
        "((any & 0xffff) | (0 - (any & 0xffff)))",
        "the upper halves of a tag's words",
        _TAG,
    ),
)

_OPENING = (
    ("keystream-of-the-tag", "2 + share.block(0),", "1 + share.block(0),", "the counter of the first blocks", _RUN),
    (
        "keystream-skips-a-block",
        "2 + share.block(1));",
        "3 + share.block(1));",
        "the counter of the second blocks",
        _LAST,
    ),
    ("keystream-used-twice", "text[1] ^ keys.b", "text[1] ^ keys.a", "two blocks under one keystream", _RUN),
    (
        "blocks-in-front-read",
        "            if (block < 0) continue;\n            // The tag",
        "            // The tag",
        "opening reads in front of a short chunk",
        _LAST,
    ),
    (
        "tag-hashed",
        "first_bytes(*reinterpret_cast<const uint4*>(chunk + 16 * block), share.size(i))",
        "*reinterpret_cast<const uint4*>(chunk + 16 * block)",
        "opening hashes a part of the tag as text",
        _LAST,
    ),
    (
        "tag-of-15-bytes",
        "load(chunk + length, TAG)",
        "load(chunk + length, TAG - 1)",
        "a byte of the claimed tag",
        _LAST,
    ),
    (
        "tag-of-the-full-chunk",
        "load(chunk + length, TAG)",
        "load(chunk + (length & ~15u), TAG)",
        "the place of a short chunk's tag",
        _LAST,
    ),
    (
        "no-barrier-before-release",
        "    __syncthreads();\n    const u32 good",
        "    const u32 good",
        "plaintext is written before all of the chunk is hashed",
        _LAST,
    ),
    (
        "every-tag-is-right",
        "const u32 good = is_zero(tag_of(shared, side));",
        "const u32 good = ~0u;",
        "no tag is compared",
        _TAG,
    ),
    ("first-word-released", "text[i].x & good", "text[i].x", "a bad chunk is not all zeros: word 0", _FULL),
    ("second-word-released", "text[i].y & good", "text[i].y", "a bad chunk is not all zeros: word 1", _FULL),
    ("third-word-released", "text[i].z & good", "text[i].z", "a bad chunk is not all zeros: word 2", _FULL),
    ("fourth-word-released", "text[i].w & good", "text[i].w", "a bad chunk is not all zeros: word 3", _FULL),
    (
        "bad-chunk-not-written",
        "const int block = share.block(i);\n            if (block < 0) continue;\n            const uint4",
        "const int block = share.block(i);\n            if (block < 0 || !good) continue;\n            const uint4",
        "a bad chunk leaves its target as it was",
        _FULL,
    ),
    (
        "length-of-the-other-side",
        "share(shared->chunk[side].length);",
        "share(shared->chunk[0].length);",
        "the length of the second chunk of a block",
        _RUN,
    ),
    (
        "single-block-not-written",
        "if (share.block(1) >= 0) {\n        uint4 text[2] = {from_field",
        "if (share.block(1) > 0) {\n        uint4 text[2] = {from_field",
        "the first block of a short chunk",
        _LAST,
    ),
    ("opened-too-long", "plain, share.size(i));", "plain, 16);", "opening writes past the end of the target", _LAST),
    ("verdict-always-good", "return good != 0;", "return true;", "a bad chunk is zeros, but not reported", _TAG),
)

_SEALING = (
    (
        "no-barrier-before-keystream",
        "length, side);\n    __syncthreads();\n    const Share share(length);",
        "length, side);\n    const Share share(length);",
        "sealing uses a start that is not there yet",
        _LAST,
    ),
    (
        "blocks-in-front-sealed",
        "if (share.block(i) >= 0) text[i] = load(",
        "text[i] = load(",
        "sealing reads in front of a short chunk",
        _LAST,
    ),
    (
        "source-read-too-far",
        "load(source + 16 * share.block(i), share.size(i))",
        "load(source + 16 * share.block(i), 16)",
        "sealing reads past the end of the source",
        _LAST,
    ),
    (
        "keystream-hashed",
        "first_bytes(text[i], share.size(i));",
        "text[i];",
        "sealing hashes keystream after the end",
        _LAST,
    ),
    (
        "keystream-in-front-hashed",
        "block < 0 ? make_uint4(0, 0, 0, 0) : first_bytes",
        "first_bytes",
        "sealing hashes keystream in front of a short chunk",
        _LAST,
    ),
    (
        "plaintext-hashed",
        (
            "        cipher<BITS>(shared, share, side, text);\n#pragma unroll\n        for (int i = 0; i < 2; ++i) {\n"
            "            const int block = share.block(i);\n            text[i] ="
        ),
        (
            "#pragma unroll\n        for (int i = 0; i < 2; ++i) {\n            const int block = share.block(i);\n"
            "            text[i] ="
        ),
        "sealing does not encrypt",
        _LAST,
    ),
    (
        "sealed-tag-xored",
        "finish_chunk<BITS>(shared, state, make_uint4(0, 0, 0, 0), side)",
        "finish_chunk<BITS>(shared, state, make_uint4(1, 0, 0, 0), side)",
        "a bit of a sealed tag",
        _LAST,
    ),
    (
        "no-barrier-before-the-tag",
        "    __syncthreads();\n    const uint4 tag",
        "    const uint4 tag",
        "a tag is written before all of the chunk is hashed",
        _LAST,
    ),
    (
        "sealed-tag-of-15-bytes",
        "store(chunk + length, tag, TAG)",
        "store(chunk + length, tag, TAG - 1)",
        "the last byte of a sealed tag",
        _LAST,
    ),
    (
        "sealed-tag-after-a-gap",
        "store(chunk + length, tag",
        "store(chunk + (length + 15 & ~15u), tag",
        "the place of a short chunk's tag",
        _LAST,
    ),
)

_COPIES = (
    ("head-longer-than-the-piece", "ahead < size ? ahead : size;", "ahead;", "pieces shorter than the head", _ALIGNED),
    ("head-of-2-bytes", "& 3, head", "& 1, head", "words at even places", _ALIGNED),
    (
        "head-from-the-chunk-start",
        "i < head; i += members) target[i] = bytes[offset + i];",
        "i < head; i += members) target[i] = bytes[i];",
        "the source of a head",
        _ALIGNED,
    ),
    ("words-without-head", "from = offset + head + 4 * i", "from = offset + 4 * i", "the source of words", _ALIGNED),
    (
        "words-not-shifted",
        "        if (from & 3) value = __funnelshift_r(value, word[1], 8 * (from & 3));\n",
        "",
        "words from odd places",
        _ALIGNED,
    ),
    (
        "words-shifted-by-8",
        "word[1], 8 * (from & 3))",
        "word[1], 8 * (from & 1))",
        "words from places 2 and 3",
        _ALIGNED,
    ),
    (
        "words-behind-their-place",
        "(target + head + 4 * i) = value",
        "(target + 4 * i) = value",
        "words' target",
        _ALIGNED,
    ),
    ("no-tail", "i = tail + member; i < size;", "i = tail + member; i < tail;", "the last bytes of a piece", _ALIGNED),
    (
        "tail-from-the-chunk-start",
        "i < size; i += members) target[i] = bytes[offset + i];",
        "i < size; i += members) target[i] = bytes[i];",
        "the source of a tail",
        _ALIGNED,
    ),
)

_PLANS = (
    (
        "last-byte-not-cleared",
        "i < table.at[segment].limit; i +=",
        "i + 1 < table.at[segment].limit; i +=",
        "the last byte after an altered plan",
        _ALTERED,
    ),
    (
        "other-blocks-clear",
        "if (blockIdx.x != 0) return;",
        "if (blockIdx.x == 0) return;",
        "a grid of one block clears nothing",
        _ALTERED,
    ),
    (
        "clears-a-part",
        "i += FASTRACK_THREADS) target",
        "i += 2 * FASTRACK_THREADS) target",
        "half of the result after an altered plan",
        _ALTERED,
    ),
    (
        "number-beyond-the-message",
        "(chunks[i] < last(segment) ? chunks[i] : last(segment))",
        "chunks[i]",
        "a number that means no bad chunk is reported",
        _OUTSIDE,
    ),
    (
        "last-number-of-32-bits",
        "return segment.size / CHUNK;",
        "return static_cast<u32>(segment.size / CHUNK);",
        "messages of 64 TiB and more",
        _WHOLE,
    ),
    (
        "chunk-beyond-the-message",
        "        if (chunks[i] > last(segment)) return 0;\n",
        "",
        "a chunk that the message does not have is read",
        _OUTSIDE,
    ),
    ("last-chunk-has-no-length", "chunks[i] > last(segment)", "chunks[i] >= last(segment)", "the last chunk", _LENGTHS),
    (
        "length-of-32-bits",
        "left < CHUNK ?",
        "static_cast<u32>(left) < CHUNK ?",
        "a chunk 4 GiB before the end is short",
        _WHOLE,
    ),
    (
        "offset-of-a-chunk-of-32-bits",
        "segment.size - chunks[i] * CHUNK",
        "segment.size - static_cast<u32>(chunks[i] * CHUNK)",
        "a chunk beyond 4 GiB has a length too large",
        _WHOLE,
    ),
    ("begin-after-end", "begin > end || end > pieces", "end > pieces", "pieces that end before they begin", _OUTSIDE),
    ("end-of-the-table", "begin > end || end > pieces", "begin > end", "a read past the table", _OUTSIDE),
    ("end-of-the-table-and-one", "end > pieces)", "end > pieces + 1)", "a piece after the table", _OUTSIDE),
    ("last-piece-refused", "end > pieces)", "end >= pieces)", "a chunk whose pieces are the table's last", _ALIGNED),
    (
        "bad-starts-not-reported",
        "end > pieces) return false;",
        "end > pieces) return true;",
        "pieces outside the table are not reported",
        _OUTSIDE,
    ),
    ("warps-all-take-a-piece", "p += THREADS_OF_TEAM / members", "p += 1", "two warps copy one piece", _PIECES),
    (
        "warps-skip-pieces",
        "p += THREADS_OF_TEAM / members",
        "p += THREADS_OF_TEAM",
        "pieces after the sixteenth",
        _PIECES,
    ),
    ("one-warp-for-all-pieces", "begin + thread / members", "begin", "all warps copy the same piece", _PIECES),
    ("member-is-the-thread", "member = thread % members", "member = thread", "beginnings of pieces", _PIECES),
    ("offset-not-checked", "offset <= length && size", "size", "an offset beyond the chunk", _OUTSIDE),
    ("size-in-the-chunk-not-checked", "size <= length - offset && ", "", "a piece that ends beyond the chunk", _BOUNDS),
    ("place-not-checked", "place <= limit && size", "size", "a place beyond the result", _OUTSIDE),
    ("size-in-the-result-not-checked", " && size <= limit - place", "", "a piece that ends beyond the result", _BOUNDS),
    ("offset-at-the-end-refused", "offset <= length", "offset < length", "an empty piece at a chunk's end", _BOUNDS),
    (
        "piece-up-to-the-end-refused",
        "size <= length - offset",
        "size < length - offset",
        "a chunk's last byte",
        _BOUNDS,
    ),
    ("piece-one-too-long", "size <= length - offset", "size <= length + 1 - offset", "a byte after the chunk", _BOUNDS),
    (
        "place-at-the-end-refused",
        "place <= limit &&",
        "place < limit &&",
        "an empty piece at the result's end",
        _BOUNDS,
    ),
    (
        "result-up-to-the-end-refused",
        "size <= limit - place",
        "size < limit - place",
        "the result's last byte",
        _BOUNDS,
    ),
    ("result-one-too-long", "size <= limit - place", "size <= limit + 1 - place", "a byte after the result", _BOUNDS),
    (
        "offset-of-32-bits",
        "offset = table[3 * p],",
        "offset = static_cast<u32>(table[3 * p]),",
        "an offset beyond 4 GiB passes",
        _OUTSIDE,
    ),
    (
        "place-of-32-bits",
        "place = table[3 * p + 1],",
        "place = static_cast<u32>(table[3 * p + 1]),",
        "a place beyond 4 GiB passes",
        _OUTSIDE,
    ),
    (
        "size-of-32-bits",
        "size = table[3 * p + 2];",
        "size = static_cast<u32>(table[3 * p + 2]);",
        "a size beyond 4 GiB passes",
        _OUTSIDE,
    ),
    (
        "target-of-32-bits",
        "copy_out(segment.target + place,",
        "copy_out(segment.target + static_cast<u32>(place),",
        "the target of a piece beyond 4 GiB of the result",
        _GATHER_FAR,
    ),
    ("bad-piece-not-reported", "fits = false;", "", "a piece outside is skipped, but not reported", _OUTSIDE),
)

_RUNS = (
    (
        "registers",
        "__launch_bounds__(FASTRACK_THREADS, 2)",
        "__launch_bounds__(FASTRACK_THREADS, 1)",
        "one block, not two, fits a multiprocessor",
        _REGISTERS,
    ),
    (
        "size-left-of-32-bits",
        "return left < CHUNK ?",
        "return static_cast<u32>(left) < CHUNK ?",
        "a chunk 4 GiB before the end of a run is short",
        _LARGE,
    ),
    ("size-left-without-index", "size - index * CHUNK", "size", "the length of a run's last chunk", _RUN),
    (
        "full-chunk-never-ends",
        "return left < CHUNK ?",
        "return left <= CHUNK - 1 + CHUNK ?",
        "a chunk before a short last one is too long",
        _RUN,
    ),
    (
        "opened-offset-of-32-bits",
        "segment.target + static_cast<u64>(index) * CHUNK",
        "segment.target + index * CHUNK",
        "opening: the target beyond 4 GiB of a run",
        _FAR,
    ),
    (
        "opened-offset-of-sealed",
        "segment.target + static_cast<u64>(index) * CHUNK",
        "segment.target + static_cast<u64>(index) * STRIDE",
        "opening: the target of all chunks but the first",
        _RUN,
    ),
    (
        "opened-under-one-number",
        "(segment.name & NUMBERS) + index, side)",
        "segment.name & NUMBERS, side)",
        "opening: one nonce for a run",
        _RUN,
    ),
    (
        "opened-number-of-32-bits",
        "(segment.name & NUMBERS) + index, side)",
        "static_cast<u32>(segment.name) + index, side)",
        "opening: the nonce of a large number",
        _RUN,
    ),
    (
        "one-side-to-open",
        "const int side = turn++ & 1;",
        "const int side = 0;",
        "a chunk's sums are overwritten while others read them",
        _RUN,
    ),
    (
        "last-chunk-not-opened",
        "while (i < count) {",
        "while (i + 1 < count) {",
        "the last chunk of a run is not opened",
        _RUN,
    ),
    (
        "open-does-not-wipe",
        "        } while (i < end);\n    }\n    leave(shared);",
        "        } while (i < end);\n    }",
        "opening leaves keys in shared memory",
        _SECRETS,
    ),
    (
        "verdict-not-written",
        "if (!good && threadIdx.x == 0) atomicMin(verdict, segment.name + index);",
        "(void)good;",
        "opening reports no bad chunk",
        _TAG,
    ),
    (
        "verdict-of-good-chunks",
        "if (!good && threadIdx.x == 0) atomicMin(verdict, segment.name",
        "if (threadIdx.x == 0) atomicMin(verdict, segment.name",
        "opening reports good chunks",
        _LAST,
    ),
    (
        "verdict-of-the-last",
        "atomicMin(verdict, segment.name + index)",
        "atomicExch(verdict, segment.name + index)",
        "the last bad chunk is reported, not the lowest",
        _LOWEST,
    ),
    (
        "verdict-not-atomic",
        "atomicMin(verdict, segment.name + index)",
        "*verdict = segment.name + index",
        "blocks write the verdict over each other",
        _LOWEST,
    ),
    (
        "verdict-within-the-run",
        "atomicMin(verdict, segment.name + index)",
        "atomicMin(verdict, static_cast<u64>(i))",
        "the number within the run is reported",
        _LOWEST,
    ),
    (
        "source-offset-of-32-bits",
        "source + static_cast<u64>(i) * CHUNK",
        "source + i * CHUNK",
        "sealing: the source beyond 4 GiB of a run",
        _FAR,
    ),
    (
        "sealed-target-of-32-bits",
        "sealed + static_cast<u64>(i) * STRIDE, first",
        "sealed + i * STRIDE, first",
        "sealing: the target beyond 4 GiB of a run",
        _FAR,
    ),
    (
        "sealed-without-room-for-tags",
        "sealed + static_cast<u64>(i) * STRIDE, first",
        "sealed + static_cast<u64>(i) * CHUNK, first",
        "sealing: chunks over tags",
        _RUN,
    ),
    (
        "sealed-under-one-number",
        "STRIDE, first + i, side)",
        "STRIDE, first, side)",
        "sealing: a nonce is used twice",
        _RUN,
    ),
    (
        "sealed-number-of-32-bits",
        "STRIDE, first + i, side)",
        "STRIDE, static_cast<u32>(first + i), side)",
        "sealing: nonces repeat after 64 TiB",
        _RUN,
    ),
    (
        "seal-does-not-wipe",
        "first + i, side);\n    }\n    leave(shared);",
        "first + i, side);\n    }",
        "sealing leaves keys in shared memory",
        _SECRETS,
    ),
)

_GATHERS = (
    (
        "gathered-number-is-its-place",
        "plain->bytes, plan.chunks[i], side)",
        "plain->bytes, i, side)",
        "the nonce of a packed chunk",
        _ORDER,
    ),
    (
        "gathered-number-of-32-bits",
        "plain->bytes, plan.chunks[i], side)",
        "plain->bytes, static_cast<u32>(plan.chunks[i]), side)",
        "the nonce of a large number",
        _WHOLE,
    ),
    (
        "gathered-length-by-place",
        "plan.length(i, segment)",
        "plan.length(0, segment)",
        "the length of a packed chunk",
        _ALONE,
    ),
    (
        "bad-gathered-chunk-not-reported",
        "        if (!good && threadIdx.x == 0) atomicMin(verdict, plan.known(i, segment));\n",
        "        (void)good;\n",
        "a bad chunk is zeros, but not reported",
        _ORDER,
    ),
    (
        "verdict-by-place",
        "if (!good && threadIdx.x == 0) atomicMin(verdict, plan.known(i, segment))",
        "if (!good && threadIdx.x == 0) atomicMin(verdict, static_cast<u64>(i))",
        "the place of a bad chunk is reported",
        _ORDER,
    ),
    (
        "verdict-of-the-last-gathered",
        "if (!good && threadIdx.x == 0) atomicMin(verdict, plan.known(i, segment))",
        "if (!good && threadIdx.x == 0) atomicExch(verdict, plan.known(i, segment))",
        "the last bad chunk is reported",
        _ORDER,
    ),
    (
        "no-barrier-before-pieces",
        "        __syncthreads();\n        // A barrier",
        "        // A barrier",
        "pieces are copied before the chunk is opened",
        _PIECES,
    ),
    (
        "one-side-to-gather",
        "const int side = turn & 1;\n        const Segment&",
        "const int side = 0;\n        const Segment&",
        "a chunk's length is overwritten while others read it",
        _ORDER,
    ),
    (
        "bad-plan-not-reported",
        "if (!plan.scatter<THREADS>(i, length, segment, plain->bytes, threadIdx.x)) {",
        "if (!plan.scatter<THREADS>(i, length, segment, plain->bytes, threadIdx.x) && false) {",
        "pieces outside are not reported",
        _OUTSIDE,
    ),
    (
        "only-thread-0-reports",
        "if (!plan.scatter<THREADS>(i, length, segment, plain->bytes, threadIdx.x)) {",
        "if (!plan.scatter<THREADS>(i, length, segment, plain->bytes, threadIdx.x) && threadIdx.x == 0) {",
        "of many pieces only those of the first warp are reported",
        _BOUNDS,
    ),
    (
        "gather-does-not-wipe",
        "    leave(shared);\n    for (u32 i = threadIdx.x; i < CHUNK / 4",
        "    for (u32 i = threadIdx.x; i < CHUNK / 4",
        "a gather leaves keys in shared memory",
        _SECRETS,
    ),
    (
        "plaintext-not-wiped",
        "i += THREADS) reinterpret_cast<u32*>(plain->bytes)[i] = 0;",
        "i += THREADS) reinterpret_cast<u32*>(plain->bytes)[i] ^= 0;",
        "a gather leaves plaintext in shared memory",
        _SECRETS,
    ),
    (
        "half-the-plaintext-wiped",
        "i < CHUNK / 4; i += THREADS)",
        "i < CHUNK / 8; i += THREADS)",
        "a gather leaves half a chunk in shared memory",
        _WIPED,
    ),
    (
        "altered-plan-is-read",
        "if (*plan_verdict != GOOD) return clear(table, segments);",
        "",
        "a plan that was not authentic is carried out",
        _ALTERED,
    ),
    ("altered-plan-clears-nothing", "return clear(table, segments);", "return;", "the results", _ALTERED),
    (
        "plan-verdict-of-32-bits",
        "if (*plan_verdict != GOOD)",
        "if (static_cast<u32>(*plan_verdict) != static_cast<u32>(GOOD))",
        "a plan whose chunk 2^32 - 1 is bad is carried out",
        _ALTERED,
    ),
    (
        "plan-verdict-zero-only",
        "if (*plan_verdict != GOOD)",
        "if (*plan_verdict == 0)",
        "a plan of which a later chunk is bad is carried out",
        _ALTERED,
    ),
)

MUTANTS = _make()
