"""Let two threads of a block of 1024 share an entry of a table."""

EDITS = {
    "aes.cuh": [
        ("threadIdx.x >= 256", "threadIdx.x & 256"),
        ("u32 i = 0; i < 8; ++i", "u32 i = threadIdx.x / 512; i < 8; i += 2"),
        ("[i + threadIdx.x & 7]", "[i + 2 * threadIdx.x & 7]"),
    ]
}
