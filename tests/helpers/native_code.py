"""Machine code that the module of the package has not: compiled here, in this process."""

import pytest

from fastrack._crypto.native import functions_of

WITHOUT_COMPILER = "nothing can be compiled here: the generator, llvmlite or numba is absent"


def needs_compiler():
    """Skip a test, or the module of tests that is imported now, where nothing can be compiled."""
    for name in ("llvmlite", "numba", "fastrack_native"):
        pytest.importorskip(name, reason=WITHOUT_COMPILER)


def build(functions, forms=()):
    """Compile functions that `compiler.compiled` made, which call those of some forms, and return their module."""
    needs_compiler()
    from fastrack_native import build, compiler

    return build.load_here(build.make_object_of(functions, list(forms), compiler.host_target()))


def build_form(name, form):
    """Compile all functions of a form, and return them as `native.functions` does."""
    needs_compiler()
    from fastrack_native.build import functions_of_isa

    return functions_of(build(functions_of_isa(name, form), [form]), name)


def forget():
    """Forget what the generators have emitted so far, for one that is altered now or was till now."""
    needs_compiler()
    from fastrack_native.compiler import cipher

    cipher.cache_clear()
