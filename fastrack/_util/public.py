"""Give public classes and functions the import path that users know, and calls that do not fit the way to call them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib import import_module
from types import FunctionType
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_MEANT = {"key": "keys", "keys": "key", "batch_size": "global_batch_size"}
_MEANT |= {"null": "nulls", "na_values": "nulls", "type": "types", "dtype": "types", "usecols": "columns"}
"""Parameters of another name, by the one that was given."""
_OF_LOADERS = {"batch_size", "shuffle", "num_workers", "collate_fn", "drop_last"}

_ELSEWHERE = {
    "load_file": "It needs no key and opens nothing; load_tensors(path, device, keys=...) opens the tensors",
    "SealedTensor": "seal(tensor, key, name) makes one",
}
"""Other functions to call, by the function that was called in their place."""
_VERBS = {"load": "load_file", "save": "save_file", "encrypt": "seal", "decrypt": "unseal", "Dataset": "SealedDataset"}
"""Names of other packages, with ours."""


def public(thing: T) -> T:
    """Set ``__module__`` of a class or function to the package that has it, and have its calls explained.

    The package is what comes before the first private name: "fastrack", or such as "fastrack.attest". Tracebacks,
    pickles and documentation name the class or function from there.
    """
    return published(thing, thing.__module__.partition("._")[0])


def published(thing: T, module: str) -> T:
    """Set ``__module__`` of a class or function to a module that has it, and have its calls explained."""
    made = getattr(thing, "__init__", None)
    if isinstance(thing, FunctionType):
        thing = explained(thing)
    elif isinstance(made, FunctionType) and made.__module__.startswith("fastrack"):  # no class of typing or torch
        thing.__init__ = explained(made, thing.__name__)  # type: ignore[misc, attr-defined]
    thing.__module__ = module
    return thing


def explained(function: F, name: str | None = None) -> F:
    """Have a call whose arguments do not fit raise TypeError with the way to call the function, or class `name`."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            inner = error.__traceback__ and error.__traceback__.tb_next
            while inner is not None and inner.tb_frame.f_code.co_filename == contextlib.__file__:
                inner = inner.tb_next  # of a context manager, which calls the function
            if inner is not None:
                raise  # by the function, to which the arguments did fit
            problem = str(error)
        raise TypeError(_explain(function, name or function.__name__, problem, kwargs)) from None

    return call  # type: ignore[return-value]


def _explain(function: Callable[..., Any], name: str, problem: str, given: Mapping[str, object]) -> str:
    from inspect import Parameter, Signature, signature  # deferred: few processes need it

    known = {name: each for name, each in signature(function).parameters.items() if name != "self"}
    usage = Signature([each.replace(annotation=Parameter.empty) for each in known.values()])
    message = f"{name}() {problem.partition('() ')[2]}: expected {name}{usage}"
    advice = [f"Pass {_MEANT[each]}=" for each in given if each not in known and _MEANT.get(each) in known]
    advice += [f"Pass {each}= to the DataLoader" for each in given if each not in known and each in _OF_LOADERS]
    return ". ".join([message, *advice[:1], *([_ELSEWHERE[name]] if name in _ELSEWHERE else [])])


def lazy(namespace: dict[str, Any]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its public names on first use.

    ``__init__.pyi`` lists them, for type checkers as for this function, which reads it when the first name, or
    `__all__`, is asked for. The package's own modules that it lists are imported on first use too, but are in neither
    list: who asks for all that ``dir`` lists, such as a debugger, would import frameworks, and fail where one is not
    installed.
    """
    package = namespace["__name__"]

    @cache
    def homes() -> dict[str, str]:
        return _read_homes(namespace)

    def names() -> list[str]:
        return sorted(name for name, home in homes().items() if home != package)

    def load(name: str) -> object:
        home = homes().get(name)
        if name == "__all__":
            value: object = names()
        elif home is None:
            from difflib import get_close_matches  # deferred: few processes need it

            near = [] if name.startswith("_") else get_close_matches(_VERBS.get(name, name), names(), n=1)
            advice = f". Did you mean {near[0]}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}", name=name)
        else:
            value = import_module(f"{package}.{name}") if home == package else getattr(import_module(home), name)
        namespace[name] = value
        return value

    return load, lambda: sorted({*namespace, "__all__", *names()})


def _read_homes(namespace: Mapping[str, Any]) -> dict[str, str]:
    """Return the module of each name that a package's stub imports in the form ``from module import name as name``."""
    stub = namespace["__spec__"].loader.get_data(f"{namespace['__file__'].rpartition('.')[0]}.pyi").decode()
    statements = [each.partition(" import ") for each in f"\n{stub}".split("\nfrom ")[1:]]
    return {name.split()[0].rstrip(","): home for home, _, names in statements for name in names.split(" as ")[1:]}
