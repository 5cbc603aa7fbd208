"""Arrays of a KV cache by the names that vLLM gives to the orders of their axes."""

import math

# From the outermost axis to the innermost: layer, block, head, token, content.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def pieces_of(layout, **sizes):
    """Return the number of pieces of a block, which is that of arrays of blocks, and the bytes of each."""
    at = layout.index("B")
    return math.prod(sizes[axis] for axis in layout[:at]), math.prod(sizes[axis] for axis in layout[at + 1 :])
