"""Wait for safetensors, and then have it open the sealed folders of ``fastrack run``. Python runs it at its start.

``fastrack run`` puts this folder in front of the PYTHONPATH of one program. Until safetensors is imported, nothing of
fastrack is. The syntax is that of old versions, as the program may start other interpreters than fastrack's.
"""

# ruff: noqa: INP001, PTH100, PTH120 - no package; and pathlib would take each start of Python some milliseconds

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Waiting:
    """Finder that leaves safetensors to the others, and prepares it once its code has run.

    It stays until then: `importlib.util.find_spec` asks finders, too, and imports nothing.
    """

    def find_spec(self, name: str, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if name != "safetensors":
            return None
        # Nor one like it, of another installation: each would ask the other, without end.
        others = [each for each in sys.meta_path if type(each).__name__ != "_Waiting" and hasattr(each, "find_spec")]
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_prepare(module) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
                execute(module)
                if module.__name__ == name and self in sys.meta_path:
                    _prepare()
                    sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_prepare  # type: ignore[method-assign]
        return spec


def _prepare() -> None:
    try:
        from fastrack._models.launched import attach
    except ImportError as error:
        # An interpreter without fastrack, or with another version: what it opens of plain files is as ever, and a
        # sealed file says by itself that it is one.
        if (error.name or "").partition(".")[0] != "fastrack":
            raise
    else:
        attach()


def _run_hidden() -> None:
    """Run the module of this name that this one hides, of the environment or the distribution."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules[__name__] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if "safetensors" in sys.modules:  # a .pth file of the environment imported it
    _prepare()
elif "FASTRACK_RUN" in os.environ:
    sys.meta_path.insert(0, _Waiting())
_run_hidden()
