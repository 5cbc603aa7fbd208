"""Sizes, rounds and time limits of the measurements: all of them, or fewer."""

from __future__ import annotations

from dataclasses import dataclass, replace

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes are bytes of plaintext, shares of the multiprocessors."""

    link_sizes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 8 * MIB, 256 * MIB)
    fill_threads: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16, 24, 32)
    latency_sizes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB)
    kernel_sizes: tuple[int, ...] = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
    kernel_shares: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8)
    transfer_sizes: tuple[int, ...] = (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
    ablation_sizes: tuple[int, ...] = (64 * KIB, 16 * MIB, 256 * MIB, GIB)
    rounds: int = 15  # at most; each runs every path once, in turn
    budget: float = 8.0  # seconds after which a comparison starts no other round, once it has three
    spread: int = 256 * MIB  # least sum of a path's buffers, so that no cache holds them
    group: int = 16 * MIB  # least work of kernels between two readings of the device's clock
    sweep_size: int = 256 * MIB
    sweep_slabs: tuple[int, ...] = (MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
    sweep_depths: tuple[int, ...] = (2, 3, 4, 6, 8)
    sweep_leads: tuple[int, ...] = (256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
    lead_sizes: tuple[int, ...] = (MIB, 4 * MIB, 16 * MIB)  # of transfers with a large first slab
    sweep_shares: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
    timeline_size: int = 256 * MIB
    matrix: int = 8192  # its side
    products: int = 50  # that are one run
    stream_size: int = 256 * MIB
    stream_shares: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8)
    loop_rows: int = 1280  # of 15,000 values in a batch
    loop_steps: int = 24  # batches of a run
    loop_products: tuple[int, ...] = (1, 4, 16)  # in a batch
    tools: tuple[str, ...] = ("memcheck",)  # of compute-sanitizer; tests/ptx looks for races
    tool_seconds: float = 120.0

    def shortened(self, *small, shares, budget):
        """Return a plan that measures kernels at two sizes only, and at small ones."""
        candidates = (*small, 8 * MIB, 256 * MIB)
        sizes = tuple(size for size in candidates if size <= max(self.kernel_sizes)) or self.kernel_sizes
        return replace(self, kernel_sizes=sizes, kernel_shares=shares, rounds=7, budget=min(budget, self.budget))


FULL = Plan()
QUICK = Plan(
    kernel_sizes=(MIB, 256 * MIB),
    kernel_shares=(1, 1 / 4),
    transfer_sizes=(64 * KIB, 16 * MIB, 256 * MIB),
    ablation_sizes=(16 * MIB, 256 * MIB),
    rounds=5,
    budget=2.0,
    sweep_slabs=(4 * MIB, 8 * MIB, 16 * MIB),
    sweep_depths=(3, 4),
    sweep_leads=(MIB, 4 * MIB),
    lead_sizes=(4 * MIB,),
    sweep_shares=(1, 1 / 4),
    products=20,
    stream_shares=(1, 1 / 4),
    loop_products=(4,),
)


def size_of(count):
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}"
        count /= 1024
    return f"{count:g} GiB"


def fraction(share):
    """A share for people: 1/4."""
    return "1" if share == 1 else f"1/{round(1 / share)}" if (1 / share) % 1 == 0 else f"{share:g}"
