"""List and run the stages of ``make gpu``: each is a module with a function `run`, and a process of its own."""

from importlib import import_module

STAGES = {
    "first": "first contact: versions, known answers, link, latency, kernels, instruction rates",
    "tests": "the tests of tests/gpu",
    "memcheck": "a few chunks through every kernel under memcheck, racecheck and synccheck",
    "variants": "the kernels next to every candidate, with three splits of shared memory",
    "figures": "kernels, transfers, ablation, timeline, slowdown and sweeps, and a picture",
    "loop": "a training loop fed by `fastrack.wrap`, next to batches that are there already",
    "profile": "one profile of the kernel that opens, by Nsight Compute",
}


def run(stage):
    """Run a stage, and say in its document how it ended."""
    import_module(f"bench.gpu.stages.{stage.record.document['stage']}").run(stage)
    stage.record.finish()
