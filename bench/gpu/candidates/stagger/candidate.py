"""Start one of the two blocks on a multiprocessor half a chunk later."""

_LOOP = """
    u32 turn = 0, i = blockIdx.x;
    while (i < count) {
        const auto&"""
_DELAY = """
    // Half of what a chunk takes [estimate], for one of the two blocks on a multiprocessor.
    if (blockIdx.x >= gridDim.x / 2) __nanosleep(3000);"""

EDITS = {"fastrack.cu": [(_LOOP, _DELAY + _LOOP)]}
