"""Describe the machine that results were measured on."""

from dataclasses import asdict
from pathlib import Path

from fastrack._cli import machine

ROOT = Path(__file__).resolve().parents[1]


def read_machine():
    """Return software, CPU and memory."""
    cpu, memory = asdict(machine.read_cpu()), asdict(machine.read_memory())
    return {"software": machine.read_software(), "cpu": cpu, "memory": memory}
