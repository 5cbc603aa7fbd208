"""The parts of llvmlite that tests use. Where it is absent, a module of tests that imports this is skipped."""

from helpers.native_code import needs_compiler

needs_compiler()
from llvmlite import binding, ir  # noqa: E402, F401
