"""Compile loops with numba, and link them with LLVM IR of our own, to object code that needs numba no more.

numba lowers the loops, and what they call of the cipher is declared there alone. All of it is then optimised together,
for a platform that may be another than that of this process. Importing this imports numba.
"""

from __future__ import annotations

import inspect
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import cfunc, njit, types

from fastrack._crypto.isa import INSTRUCTION_SETS, InstructionSet
from fastrack_native.extension import INIT, METHODS, emit_module
from fastrack_native.llvm import declare

# The functions outside of the object code that it may call: those of the C library, and those of Python that the
# wrappers call. Without a reference to others, a compiled function neither raises an exception nor allocates memory.
_ALLOWED = re.compile(
    r"clock_gettime|getauxval|mem(cpy|move|set)|pthread_(cond|create|mutex|self|set|sig)\w*|sched_\w+|sig(del|fill)set|usleep"
    r"|Py(Buffer_Release|Err_(BadArgument|Occurred)|Eval_(Restore|Save)Thread|Long_(As|From)LongLong|ModuleDef_Init"
    r"|Object_GetBuffer)|llvm\..+"
)
_KINDS = ("int", "bool", "Array", "Role", "Counters")  # the annotations of arguments

# The marks of places that may be jumped to: LLVM begins functions with ENDBR64 or with BTI. 8 is "the lower of two".
_FLAGS = {
    architecture: f'\n!llvm.module.flags = !{{!999999}}\n!999999 = !{{i32 8, !"{flag}", i32 1}}\n'
    for architecture, flag in {"x86_64": "cf-protection-branch", "aarch64": "branch-target-enforcement"}.items()
}


def compiled(function: Any) -> Any:
    """Compile a function for other compiled functions, and for `compile_functions`."""
    return njit(nogil=True)(function)


def compiled_with_lock(function: Any) -> Any:
    """Compile a function that keeps the interpreter's lock while it runs.

    It is for functions so short that releasing the lock would cost more under contention.
    """
    return njit(nogil=False)(function)


@cache
def cipher(isa: InstructionSet | None) -> ir.Module:
    """Return the module of the functions of an instruction set, or of every one, which gets them as they are needed."""
    return ir.Module(f"fastrack_cipher_{isa}")


def declare_cipher(
    module: ir.Module, isa: InstructionSet | None, build: Callable[[ir.Module], ir.Function]
) -> ir.Function:
    """Return the declaration of a function that `build` defines in a module, if needed, and that numba never sees.

    numba compiles what it lowers for the CPU of this process at once, where others would end the process.
    """
    defined = build(cipher(isa))
    defined.linkage = "external"
    binding.add_symbol(defined.name, 1)  # numba links what it compiles, and nothing runs that
    return declare(module, defined.name, defined.function_type)


def compile_functions(
    functions: dict[str, Any],
    isas: Sequence[InstructionSet],
    target: Target,
    *,
    helpers: dict[str, Any],
    name: str,
    doc: str,
) -> bytes:
    """Return the object code of an extension module of functions that `compiled` or `compiled_with_lock` made.

    `functions` are those that Python calls, by their names. Their arguments are integers of 64 bits, annotated as `int`
    or `bool`, and addresses of arrays, annotated as `Array`. They return an integer, a boolean or None. `helpers` are
    `share` and `serve` of `kernels_threads`, if there are kernels.

    A function whose last argument is annotated as `Counters` is a kernel: `workers.run` calls it on several threads. In
    place of the counters Python gives four integers, for `share`, and it gets the first bad chunk. If its first
    argument is annotated as `Role`, it gets `CALLER` or `WORKER` there.

    Without a `name` it is code for this process, for `load_here`.
    """
    machine = target_machine(target, here=not name)
    linked = binding.parse_assembly("")
    rows = []
    for symbol, function in (*functions.items(), *helpers.items()):
        signature = inspect.signature(function.py_func)
        kinds = [parameter.annotation for parameter in signature.parameters.values()]
        if not set(kinds) <= set(_KINDS):
            raise TypeError(f"expected arguments of {', '.join(_KINDS)}, got {signature} of {function}")
        is_void = signature.return_annotation == "None"
        # A module that has the function, with C's calling convention, and all that it calls.
        callback = cfunc((types.void if is_void else types.int64)(*[types.int64] * len(kinds)))(function.py_func)
        lowered = binding.parse_assembly(callback.inspect_llvm())
        lowered.get_function(callback.native_name).name = f"fastrack_c_{symbol}"
        linked.link_in(lowered)
        if symbol in functions:
            rows.append((symbol, kinds, is_void, function.targetoptions["nogil"]))
    for isa in (None, *isas):
        linked.link_in(binding.parse_assembly(str(cipher(isa))))
    linked.link_in(binding.parse_assembly(str(emit_module(rows, target.triple, name, doc))))
    linked.triple, linked.data_layout = target.triple, str(machine.target_data)
    whole = binding.parse_assembly("")
    whole.link_in(binding.parse_assembly(str(linked) + _FLAGS[target.architecture]))  # gives all functions the mark
    _optimize(whole, machine, exported=INIT if name else METHODS)
    _require_known(whole)
    return bytes(machine.emit_object(whole))


def _require_known(module: Any) -> None:
    foreign = {function.name for function in module.functions if function.is_declaration}
    foreign = {name for name in foreign if not _ALLOWED.fullmatch(name)}
    if foreign:
        raise RuntimeError(
            f"expected compiled functions that neither raise nor allocate, got calls of {', '.join(sorted(foreign))}. "
            "Unset variables of numba that change what it compiles, such as NUMBA_BOUNDSCHECK and NUMBA_OPT"
        )


def _optimize(module: Any, machine: Any, *, exported: str) -> None:
    """Optimize all functions together, and remove what is not needed, which is every way to report an exception."""
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != exported:
            value.linkage = "internal"
    options = binding.create_pipeline_tuning_options(speed_level=3)
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    passes = binding.create_new_module_pass_manager()
    passes.add_refprune_pass()  # numba's counts of references to arrays, none of which it owns
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    passes.run(module, builder)


# Platforms. Code of no instruction set is for every CPU of an architecture, and no generator asks the machine that it
# runs on: the same sources give the same code on all of them.

_FIRST_LLVM = (22,)  # LLVM 20 aborts the process at "zero-call-used-regs"="all"; what of 21 is not known


@dataclass(frozen=True, slots=True)
class Target:
    """A platform: its name by `platform.machine`, LLVM's names of it and its oldest CPU, and its instruction sets."""

    architecture: str
    triple: str
    cpu: str
    isas: tuple[str, ...]


TARGETS = {
    "x86_64": Target("x86_64", "x86_64-unknown-linux-gnu", "x86-64", ("vaes-512", "vaes-256", "aesni")),
    "aarch64": Target("aarch64", "aarch64-unknown-linux-gnu", "generic", ("armv8",)),
}
assert set(INSTRUCTION_SETS) == {isa for target in TARGETS.values() for isa in target.isas}


def host_target() -> Target:
    """Return the platform of this process, to compile for it here. Raise RuntimeError if it has none."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    found = TARGETS.get(machine)
    if found is None or sys.maxsize < 1 << 62:
        raise RuntimeError(f"expected a 64-bit CPU of {' or '.join(TARGETS)}, got {platform.machine()}")
    return Target(found.architecture, binding.get_process_triple(), found.cpu, found.isas)


def require_llvm() -> None:
    """Raise RuntimeError if this LLVM cannot make the code. It would not say so, but end the process."""
    if binding.llvm_version_info < _FIRST_LLVM:
        version = ".".join(map(str, binding.llvm_version_info))
        raise RuntimeError(
            f"expected LLVM {_FIRST_LLVM[0]} or later, which numba 0.66 and later have, got LLVM {version}. "
            "Install a later numba"
        )


def target_machine(target: Target, *, here: bool = False) -> Any:
    """Return LLVM's compiler for a platform, of code for a shared object, or with `here` for this process."""
    require_llvm()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    binding.initialize_native_asmparser()  # for CPUID, which has no intrinsic
    found = binding.Target.from_triple(target.triple)
    if not here:
        return found.create_target_machine(target.cpu, "", 3, reloc="pic", codemodel="small")
    relocation = "static" if found.name.startswith("x86") else "default"
    return found.create_target_machine(target.cpu, "", 3, reloc=relocation, codemodel="jitdefault", jit=True)
