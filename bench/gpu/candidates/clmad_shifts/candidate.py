"""Multiply blocks by clmad and reduce them by shifts on every GPU, as where clmad has two lanes a clock."""

_CHOICE = "#ifndef FASTRACK_CLMAD\n"

EDITS = {"ghash.cuh": [(_CHOICE, f"#undef FASTRACK_CLMAD\n#define FASTRACK_CLMAD 1\n{_CHOICE}")]}
