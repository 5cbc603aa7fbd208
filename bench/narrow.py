"""Measure the engine for CPUs without VAES next to OpenSSL: ``python -m bench.narrow [MiB]``.

OpenSSL runs as this CPU lets it, and, in another process, without VAES, which `OPENSSL_ia32cap` hides from it. On one
thread, unless a line says otherwise, and in turns. Speeds are medians. The machine should be idle; where it is not, the
ratios of CPU time say more than those of speed.
"""

import os
import subprocess
import sys
from statistics import median

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack._bench.measure import timed_rounds
from fastrack._crypto.cobblestone import MessageKey, ciphertext_size
from fastrack._crypto.engine import get_engine
from fastrack._crypto.isa import supported_instruction_sets

MIB = 1 << 20
WHOLE = "openssl, whole buffer"
WITHOUT_VAES = "~0:~0x60000000000"  # leaf 7 of CPUID, ECX: bits 9 and 10


def measure(size, rounds=9):
    """Print the speeds in this process, and their ratios to OpenSSL on a whole buffer."""
    plain = np.tile(np.random.default_rng(0).integers(0, 256, MIB, np.uint8), size)
    out, whole, key = np.zeros_like(plain), np.zeros(plain.size + 16, np.uint8), os.urandom(32)
    cipher = AESGCM(key)
    cipher.encrypt_into(bytes(12), plain.data, None, whole.data)
    sealed = whole.copy()
    runs = {
        (WHOLE, "open"): lambda: cipher.decrypt_into(bytes(12), sealed.data, None, out.data),
        (WHOLE, "seal"): lambda: cipher.encrypt_into(bytes(12), plain.data, None, whole.data),
    }
    name = supported_instruction_sets()[-1]  # the one with vectors of one block
    for label, engine in (
        ("openssl", get_engine("openssl")),
        (name, get_engine(name, threads=1)),
        (f"{name}, {os.cpu_count()} threads", get_engine(name)),
    ):
        runs |= _runs_of(label, engine, engine.expand_key(MessageKey.raw(key, bytes(12))), plain, out)
    times = timed_rounds(runs, rounds, settle=1)
    seconds = {name: (median(times[name].seconds), times[name].cpu / rounds) for name in runs}
    for (label, work), (wall, cpu) in seconds.items():
        of_wall, of_cpu = (whole / own for whole, own in zip(seconds[WHOLE, work], (wall, cpu), strict=True))
        speed = plain.size / wall / 1e9
        print(f"  {label:22} {work} {speed:6.2f} GB/s, {of_wall:5.2f} x {WHOLE}; {of_cpu:5.2f} x by CPU time")


def _runs_of(label, engine, schedule, plain, out):
    message = np.zeros(ciphertext_size(plain.size), np.uint8)
    scratch = message.copy()
    engine.seal_run(schedule, plain, message, 0)
    return {
        (label, "open"): lambda: engine.open_run(schedule, message, out, 0),
        (label, "seal"): lambda: engine.seal_run(schedule, plain, scratch, 0),
    }


if __name__ == "__main__":
    if "--here" in sys.argv:
        measure(int(sys.argv[1]))
    else:
        size = sys.argv[1] if len(sys.argv) > 1 else "256"
        for title, variables in (("as it is", {}), ("without VAES", {"OPENSSL_ia32cap": WITHOUT_VAES})):
            print(f"AES-256-GCM, {size} MiB, OpenSSL {title}", flush=True)
            subprocess.run(
                [sys.executable, "-m", "bench.narrow", size, "--here"], env=os.environ | variables, check=True
            )
