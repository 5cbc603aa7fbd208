"""Multiply blocks by integers with holes on every GPU, as below CUDA 13.3."""

_CHOICE = "#ifndef FASTRACK_CLMAD\n"

EDITS = {"ghash.cuh": [(_CHOICE, f"#undef FASTRACK_CLMAD\n#define FASTRACK_CLMAD 0\n{_CHOICE}")]}
