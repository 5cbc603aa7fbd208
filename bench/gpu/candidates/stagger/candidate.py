"""Start one of the two blocks on a multiprocessor half a chunk later."""

_LOOP = """
    for (u32 turn = 0, i = blockIdx.x; i < count; ++turn, i += gridDim.x) {
        const int side = turn & 1;
        const bool good = open_chunk<BITS>(shared, state, sealed + static_cast<u64>(i) * STRIDE, length_of(i, size),"""
_DELAY = """
    // Half of what a chunk takes [estimate], for one of the two blocks on a multiprocessor.
    if (blockIdx.x >= gridDim.x / 2) __nanosleep(3000);"""

EDITS = {"fastrack.cu": [(_LOOP, _DELAY + _LOOP)]}
