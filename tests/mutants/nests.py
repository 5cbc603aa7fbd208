"""Mutants of what many messages in one launch need: their keys, their table, and their plans."""

_PREPARE, _SEGMENTS = "test_cu_prepare.py::test_", "test_cu_segments.py::test_"
_SAME = _PREPARE + "each_key_gets_the_state_of_the_standards"
_SLOTS = _PREPARE + "keys_share_slots_in_turn_and_others_are_left_alone"
_POWERS = _PREPARE + "a_message_needs_as_many_powers_as_its_chunks_have_blocks_and_one"
_MANY = _PREPARE + "more_powers_than_there_are_do_not_leave_the_state"
_WIPED = _PREPARE + "no_secret_stays_in_shared_memory"
_NEST = _SEGMENTS + "every_message_opens_under_its_own_key"
_FULL = _SEGMENTS + "a_table_may_be_full"
_LATER = _SEGMENTS + "a_message_may_go_on_in_a_later_launch"
_NAMES = _SEGMENTS + "names_of_chunks_tell_message_and_chunk"
_FIRST = _SEGMENTS + "the_first_bad_chunk_of_the_first_bad_message_is_reported_and_all_others_open"
_GATHERED = _SEGMENTS + "pieces_of_several_messages_are_gathered_in_one_launch"
_NAMED = _SEGMENTS + "a_bad_chunk_of_one_message_is_named_and_only_its_pieces_are_zeros"
_CLEARED = _SEGMENTS + "a_plan_that_was_altered_clears_the_results_of_all_its_messages"
_LOWEST = "test_cu_chunks.py::test_the_lowest_bad_number_is_reported_whatever_the_order"
_FAR = "test_cu_chunks.py::test_a_chunk_beyond_4_gib_of_a_run_is_where_it_belongs"
_GATHER_FAR = "test_cu_gather.py::test_pieces_beyond_4_gib_are_where_they_belong"

# Each is: name, file, old, new, what it breaks, the tests that notice.
NESTS = (
    ("chunk-found-late", "table.cuh", "at[middle].start <= i", "at[middle].start < i", "first chunks", _NEST),
    ("last-segment-not-found", "table.cuh", "high = segments;", "high = segments - 1;", "the last segment", _NEST),
    (
        "one-key-for-all",
        "table.cuh",
        "states + (name >> NUMBER_BITS & mask)",
        "states",
        "every message has the first key",
        _NEST,
    ),
    ("slots-not-shared", "table.cuh", " & mask);", ");", "the state of a message beyond the slots", _NAMES),
    ("place-in-bytes", "table.cuh", "16ull * place", "place", "places of segments", _NEST),
    ("number-of-37-bits", "table.cuh", "NUMBER_BITS 38", "NUMBER_BITS 37", "numbers of messages and chunks", _NEST),
    (
        "sealed-offset-of-32-bits",
        "table.cuh",
        "static_cast<u64>(index) * STRIDE",
        "index * STRIDE",
        "the source beyond 4 GiB of chunks",
        _FAR,
        _GATHER_FAR,
    ),
    (
        "key-not-changed",
        "fastrack.cu",
        "        change_key<BITS>(shared, state);\n        const u32 end",
        "        if (turn == 0) change_key<BITS>(shared, state);\n        const u32 end",
        "the second message of a block has the schedule of the first",
        _NEST,
    ),
    (
        "segment-without-end",
        "fastrack.cu",
        "const u32 end = segment.start + segment.limit;",
        "const u32 end = count;",
        "a block goes on with the wrong segment",
        _NEST,
    ),
    (
        "index-of-the-launch",
        "fastrack.cu",
        "const u32 index = i - segment.start;",
        "const u32 index = i;",
        "chunks of all segments but the first",
        _NEST,
    ),
    (
        "message-not-reported",
        "fastrack.cu",
        "atomicMin(verdict, segment.name + index)",
        "atomicMin(verdict, (segment.name & NUMBERS) + index)",
        "the message of a bad chunk",
        _FIRST,
    ),
    (
        "first-chunk-not-reported",
        "fastrack.cu",
        "atomicMin(verdict, segment.name + index)",
        "atomicMin(verdict, segment.name)",
        "the number of a bad chunk",
        _LOWEST,
    ),
    (
        "first-number-ignored",
        "fastrack.cu",
        "(segment.name & NUMBERS) + index, side)",
        "index, side)",
        "a message that goes on in a later launch",
        _LATER,
    ),
    (
        "gather-key-not-changed",
        "fastrack.cu",
        "if (i - segment.start < gridDim.x) change_key",
        "if (turn == 0) change_key",
        "a gather of the second message has the schedule of the first",
        _GATHERED,
    ),
    (
        "gathered-from-the-first",
        "fastrack.cu",
        "segment.chunk(sealed, i - segment.start)",
        "segment.chunk(sealed, i)",
        "packed chunks of all messages but the first",
        _GATHERED,
    ),
    (
        "gathered-message-not-reported",
        "plan.cuh",
        "return segment.name + (",
        "return (",
        "the message of a bad chunk of a gather",
        _NAMED,
    ),
    (
        "one-result-cleared",
        "plan.cuh",
        "segment < segments; ++segment",
        "segment < 1; ++segment",
        "after an altered plan only the first result is zeros",
        _CLEARED,
    ),
    (
        "no-barrier-before-a-key",
        "chunk.cuh",
        "    __syncthreads();\n    if (threadIdx.x < Aes<BITS>::SCHEDULE_WORDS)",
        "    if (threadIdx.x < Aes<BITS>::SCHEDULE_WORDS)",
        "a schedule is overwritten while others read it",
        _NEST,
    ),
    (
        "no-barrier-after-a-key",
        "chunk.cuh",
        "= state->schedule[threadIdx.x];\n    __syncthreads();",
        "= state->schedule[threadIdx.x];",
        "a schedule is read before it is there",
        _NEST,
    ),
    ("quotient-by-x", "ghash.cuh", "carry & 0xc2000000", "carry & 0xc3000000", "H divided by x", _SAME),
    ("quotient-without-carry", "ghash.cuh", "<< 1 ^ (carry & 1)", "<< 1", "H divided by x, its lowest bit", _SAME),
    ("substituted-bytes-swapped", "prepare.cuh", "0x5410);", "0x4510);", "SubWord", _SAME),
    ("word-not-rotated", "prepare.cuh", "word, word, 8) ^", "word, word, 16) ^", "RotWord", _SAME),
    ("round-constants", "prepare.cuh", "(constant >> 7) * 0x11b", "(constant >> 7) * 0x11d", "Rcon", _SAME),
    ("second-substitution", "prepare.cuh", "WORDS == 8 &&", "WORDS == 9 &&", "the schedule of AES-256", _SAME),
    ("first-word-of-the-key", "prepare.cuh", "schedule[i - WORDS] ^ word", "word", "the schedule", _SAME),
    ("nonce-without-its-end", "prepare.cuh", "threadIdx.x < 3)", "threadIdx.x < 2)", "the last word of a nonce", _SAME),
    ("hash-key-not-divided", "prepare.cuh", "divided_by_x(to_field(", "(to_field(", "H", _SAME),
    ("last-power-missing", "prepare.cuh", "power + n <= last", "power + n < last", "the last power", _SAME, _POWERS),
    ("too-many-powers", "prepare.cuh", "power <= n && power + n <= last", "power <= n", "the rest of a state", _POWERS),
    (
        "number-of-powers-not-checked",
        "prepare.cuh",
        "count < LAST_POWER ? count : LAST_POWER",
        "count",
        "the state of the next message",
        _MANY,
    ),
    ("no-length-of-a-full-chunk", "prepare.cuh", "n == 1 && power == THREADS", "false", "full chunks", _SAME),
    (
        "powers-without-barrier",
        "prepare.cuh",
        "        }\n        __syncthreads();",
        "        }",
        "a power is read before it is there",
        _SAME,
    ),
    ("keys-of-256-bits", "fastrack.cu", "(kind & 0xffff) == 128", "false", "AES-128", _SAME),
    (
        "slot-of-a-key",
        "fastrack.cu",
        "states + (i & mask)",
        "states + i",
        "the slot of a message beyond the slots",
        _SLOTS,
    ),
    ("first-key", "fastrack.cu", "i = first + blockIdx.x", "i = blockIdx.x", "which keys are expanded", _SLOTS),
    (
        "schedule-read-early",
        "fastrack.cu",
        "        __syncthreads();\n        finish_state",
        "        finish_state",
        "H is read before it is there",
        _SAME,
    ),
    (
        "prepare-does-not-wipe",
        "fastrack.cu",
        "        finish_state(state, kind >> 16);\n    }\n    leave(shared);",
        "        finish_state(state, kind >> 16);\n    }",
        "a key schedule stays in shared memory",
        _WIPED,
    ),
    (
        "tables-read-early",
        "fastrack.cu",
        "        __syncthreads();\n        State* state",
        "        State* state",
        "a key is expanded before the tables are there",
        _SAME,
    ),
    ("a-full-table-is-too-long", "table.cuh", "high - low > 1", "high - low > 2", "segments side by side", _FULL),
)
