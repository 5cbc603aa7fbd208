"""The training code of a plan: the function, and the digest of the files that Python would import for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from importlib.machinery import SourceFileLoader, all_suffixes
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

from fastrack._util.public import public
from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError, RollbackError

Shards = Iterator[Mapping[str, Any]]
Train = Callable[[Any, Shards], Any]

_OTHERS = tuple({*all_suffixes(), ".pyc", ".pyd", ".so"} - {".py"})
"""The ends of the names of all files but sources that Python imports, here or elsewhere."""
_rest = attrgetter("co_cellvars", "co_freevars", "co_qualname", "co_stacksize", "co_varnames")


@public
def code_digest(train: str | Train) -> str:
    """Return the SHA-256 that a plan names its training code by, in hexadecimal.

    It covers the function's name in its module (``__qualname__``), and the file of this module; of a module in a
    package, all files of Python of the outermost package around it that has an ``__init__.py``, by their names with
    that of the package. Each name and content counts, after its length in 8 bytes, big-endian. Files count as they are
    on the disk: start anew a process that imported them before they were changed. Libraries are not covered: the
    measurements of the machine are.

    Parameters
    ----------
    train : str or callable
        ``module:function``, or the function.

    Raises
    ------
    FormatError
        If there is no such function, or it has no name or no file; or if Python would import anything else there: a
        link, an extension module, bytecode that is not of its source, or a module of a package without `__init__.py`.

    Examples
    --------
    >>> from fastrack import tour
    >>> len(tour.code_digest("json.tool:main"))
    64
    """
    return load_code(train)[1]


@public
def code_files(train: str | Train) -> tuple[Path, ...]:
    """Return the files that `code_digest` counts, which a holder reads. It takes and raises what that does.

    Examples
    --------
    >>> from fastrack import tour
    >>> [path.name for path in tour.code_files("json.tool:main")]
    ['__init__.py', 'decoder.py', 'encoder.py', 'scanner.py', 'tool.py']
    """
    top, _, files = _read(train.partition(":")[0] if isinstance(train, str) else train.__module__)
    return tuple(top.parent / name for name in files)


def load_code(train: str | Train, wanted: str | None = None) -> tuple[Train, str]:
    """Return the function and its digest. Raise `RollbackError` if that is not the wanted one, before it is imported.

    Other code could make the digest look right as soon as it is imported.
    """
    function: Any = train
    if isinstance(train, str):
        module_name, _, name = train.partition(":")
    else:
        module_name, name = getattr(train, "__module__", None) or "", getattr(train, "__qualname__", "")
    top, prefix, files = _read(module_name)
    parts = [name.encode()]  # else another function of the module would run by the same plan
    for file, content in files.items():  # by another name a package's own modules would come from elsewhere
        parts += f"{prefix}{file}".encode(errors="surrogateescape"), content
    digest = sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).hexdigest()
    if wanted is not None and digest != wanted:
        raise RollbackError(
            f"beginning a visit: expected the plan's training code {wanted:.16}…, got {digest:.16}…. Install that "
            "version of it, or sign another plan"
        )
    if isinstance(train, str):
        try:
            function = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError) as error:
            raise _refusal(train, "module:function", str(error)) from error
    code, path = getattr(function, "__code__", None), getattr(sys.modules.get(module_name), "__file__", None)
    # A partial or decorated function, or one of another module, would run code of other files than are counted.
    written, path = Path("" if code is None else code.co_filename), Path(path or "")
    is_own = path in {top.parent / file for file in files} and written.is_file() and written.samefile(path)
    if not is_own or function.__qualname__ != name:
        raise _refusal(train, f"a function of {module_name}", "another")
    return function, digest


def _read(module_name: str) -> tuple[Path, str, dict[str, bytes]]:
    """Return what `_find_top` does, and the contents of all files that count by their names in its folder."""
    top, prefix = _find_top(module_name)
    files = {}
    for path in _sources(top.parent) if top.name == "__init__.py" else [top]:
        with open_regular(path) as file:
            content = file.read()
        cache = Path(importlib.util.cache_from_source(path))
        compiled = cache.read_bytes() if cache.exists() else b""
        if compiled and not _is_compiled_from(str(path), path.stat().st_mtime, content, compiled):
            raise _refusal(cache, f"the bytecode of {path.name} or none", "other bytecode")
        files[path.relative_to(top.parent).as_posix()] = content
    return top, prefix, files


def _find_top(module_name: str) -> tuple[Path, str]:
    """Return the file of a module, or of the outermost package around it with its name and slashes. Run no code."""
    spec = getattr(sys.modules.get(module_name), "__spec__", None)
    parts = getattr(spec, "name", module_name).split(".")  # also of a program, whose own name is __main__
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        try:
            module: Any = sys.modules.get(name) or importlib.util.find_spec(name)
        except (ImportError, ValueError):
            break
        file = getattr(module, "__file__", None) or getattr(module, "origin", None)
        if file is not None:
            is_package = Path(file).name == "__init__.py"
            if Path(file).is_file() and (is_package or (len(parts) == 1 and file.endswith(".py"))):  # in no archive
                return Path(file), f"{name.replace('.', '/')}/" if is_package else ""
            break
        # Else it is a namespace, which has no code of its own.
    raise _refusal(module_name, "a file of Python, in packages the outermost with an __init__.py", "another")


def _sources(folder: Path) -> list[Path]:
    """Return the sources in and below the folder of a package, in order. Refuse what else Python would import there."""
    found = sorted(folder.rglob("*"))
    for path in found:
        # A file such as core.cpython-313.pyc has no name that can be imported, but core.abi3.so is the module core.
        is_cache = path.parent.name == "__pycache__" and path.name.endswith(".pyc") and path.name.count(".") > 1
        if path.is_symlink() or (path.name.endswith(_OTHERS) and not is_cache):
            raise _refusal(path, "sources of Python, and no link, extension module or other bytecode", "one")
    return [path for path in found if path.name.endswith(".py") and not path.is_dir()]


class _Loader(SourceFileLoader):
    """Reads the code that Python would run for a file, and writes none."""

    def set_data(self, *_: object, **__: object) -> None:
        pass


@lru_cache(maxsize=256)  # of sources, as a process may make several visits
def _is_compiled_from(path: str, _modified: float, source: bytes, _compiled: bytes) -> bool:
    """Return whether the code that Python would run is that of a source. By its time alone it may be any."""
    loader = _Loader("code", path)
    try:
        return _is_same(loader.get_code("code"), loader.source_to_code(source, path))
    except (SyntaxError, ValueError, EOFError, TypeError, ImportError):
        return False


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two codes are one in what Python's own comparison leaves out too, such as the memory they take."""
    if not isinstance(one, CodeType):
        return True  # a constant, which is compared with its code
    return one == other and _rest(one) == _rest(other) and all(map(_is_same, one.co_consts, other.co_consts))


def _refusal(name: object, wanted: str, got: str) -> FormatError:
    return FormatError(f"the training code {str(name)!r:.200}: expected {wanted}, got {got}. Fix it, or name another")
