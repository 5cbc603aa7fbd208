"""List and run the stages of ``make gpu``: each is a module with a function `run`, and a process of its own."""

from importlib import import_module

STAGES = {
    "first": "first contact: versions, known answers, link, latency, kernels, instruction rates",
    "variants": "the kernels next to every candidate, with three splits of shared memory",
    "profile": "a profile of the kernel that opens, and of the fastest candidate, by Nsight Compute",
    "tests": "the tests of tests/gpu",
    "memcheck": "a few chunks through every kernel under memcheck, for two minutes at most",
    "figures": "transfers, sweeps, slowdown, kernels, ablation, and a picture",
    "loop": "a training loop fed by `fastrack.wrap`, next to batches that are there already",
}


def run(stage):
    """Run a stage, and say in its document how it ended."""
    import_module(f"bench.gpu.stages.{stage.record.document['stage']}").run(stage)
    stage.record.finish()
