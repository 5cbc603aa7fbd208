"""Describe the machine that results were measured on."""

import sys
from dataclasses import asdict
from importlib import import_module, util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_machine():
    """Return software, CPU and memory."""
    machine = import_from_cli("machine")
    cpu, memory = asdict(machine.read_cpu()), asdict(machine.read_memory())
    return {"software": machine.read_software(), "cpu": cpu, "memory": memory}


def import_from_cli(name):
    """Import a module of the command line, whether or not what the rest of that needs is installed."""
    full = f"fastrack._cli.{name}"
    try:
        return import_module(full)
    except ImportError:
        spec = util.spec_from_file_location(full, ROOT / "fastrack" / "_cli" / f"{name}.py")
        module = sys.modules[full] = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
