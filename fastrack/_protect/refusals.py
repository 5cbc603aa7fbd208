"""Refuse functions that write tensors where nothing can seal them, now or when their module is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fastrack._patches.attributes import replace, replace_everywhere
from fastrack._patches.imports import when_imported
from fastrack.errors import FastrackError

ADVICE = "Save with torch.save, safetensors or torch.distributed.checkpoint, which seal"

# By module: functions, and methods as `Class.method`. A name that a covered version of the library lacks fails the
# canary, unless it ends in a question mark.
REFUSED: dict[str, tuple[str, ...]] = {
    "numpy": ("save", "savez", "savez_compressed", "savetxt"),
    "numpy.lib.format": ("write_array",),
    "torch.jit": ("save", "save_jit_module_to_flatbuffer"),
    "torch.package": ("PackageExporter.__init__",),
    "torch.export": ("save",),
    "torch.onnx": ("export", "ONNXProgram.save?"),
    "torch.onnx.utils": ("export?",),
    "torch._inductor": ("aoti_compile_and_package", "aot_compile"),
    "torch.cuda.gds": ("GdsFile.save_storage",),
    "torch.distributed.checkpoint._consolidate_hf_safetensors": (
        "consolidate_safetensors_files",
        "consolidate_safetensors_files_on_every_rank?",
    ),
    "torch.distributed.checkpoint._async_process_executor": ("_ProcessBasedAsyncCheckpointExecutor.__init__",),
    "deepspeed.ops.op_builder.async_io": ("AsyncIOBuilder.load",),
    # Each kind of accelerator has a class of its own.
    **{
        f"deepspeed.ops.op_builder.{kind}.async_io": ("AsyncIOBuilder.load",)
        for kind in ("cpu", "klxpu", "npu", "supa", "xpu")
    },
    "deepspeed.io.fast_file_writer": ("FastFileWriter.__init__?",),
    "deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine": ("DecoupledCheckpointEngine.__init__?",),
    "accelerate.utils.offload": ("offload_weight",),
}


def refusal(what: str, advice: str = ADVICE) -> FastrackError:
    """Return the error for a function that would write plaintext."""
    return FastrackError(
        f"{what} would write plaintext: expected what can be sealed while checkpoints are protected. {advice}"
    )


def refuse(what: str) -> Callable[..., Any]:
    """Return a function that raises."""

    def refused(*_: Any, **__: Any) -> Any:
        raise refusal(what)

    return refused


def install() -> None:
    """Refuse all functions of the table, those of modules that are imported later too."""
    when_imported(dict.fromkeys(REFUSED, _refuse_in))
    _replace_maps()


def _refuse_in(module: ModuleType) -> None:
    functions = []
    for listed in REFUSED[module.__name__]:
        owner, _, name = listed.rstrip("?").rpartition(".")
        holder = getattr(module, owner, None) if owner else module
        if not hasattr(holder, name):
            if listed.endswith("?"):
                continue
            raise FastrackError(
                f"protect_checkpoints: expected {module.__name__}.{listed}, which would be refused, got none; it was "
                "moved. This version of the library is not covered. Install another"
            )
        refused = refuse(f"{module.__name__}.{listed.rstrip('?')}")
        if owner:
            replace(holder, name, refused)
        else:
            functions.append((getattr(holder, name), refused))
    replace_everywhere(*functions)


def _replace_maps() -> None:
    """Refuse NumPy's maps that are written to, such as those that Accelerate offloads weights into."""
    import numpy as np

    new, open_map = np.memmap.__new__, np.lib.format.open_memmap

    @functools.wraps(new)
    def new_map(kind: Any, filename: Any, dtype: Any = np.uint8, mode: Any = "r+", *args: Any, **options: Any) -> Any:
        _require_reading("numpy.memmap", mode)
        return new(kind, filename, dtype, mode, *args, **options)

    @functools.wraps(open_map)
    def open_new_map(filename: Any, mode: Any = "r+", *args: Any, **options: Any) -> Any:
        _require_reading("numpy.lib.format.open_memmap", mode)  # which writes a header first
        return open_map(filename, mode, *args, **options)

    replace(np.memmap, "__new__", staticmethod(new_map))
    replace_everywhere((open_map, open_new_map))


def _require_reading(what: str, mode: Any) -> None:
    if mode not in {"r", "readonly", "c", "copyonwrite"}:
        raise refusal(what, "Map it with mode='r'")
