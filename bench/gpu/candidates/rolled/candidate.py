"""Leave the rounds of AES in a loop: straight-line code that fits an instruction cache."""

_LOOP = "#pragma unroll{}\n    for (int round = 3; round < Aes<BITS>::ROUNDS; ++round) {}"

EDITS = {"aes.cuh": [(_LOOP.format("", end), _LOOP.format(" 1", end)) for end in ("s =", "{")]}
