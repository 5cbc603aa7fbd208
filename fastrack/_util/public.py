"""Give public classes and functions the import path that users know, and calls that do not fit the way to call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from types import FunctionType
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_SINGULAR_AND_PLURAL = {"key": "keys", "keys": "key"}
_ELSEWHERE = {
    "load_file": "It needs no key and opens nothing; load_tensors(path, device, keys=...) opens the tensors",
    "SealedTensor": "seal(tensor, key, name) makes one",
}
"""Other functions to call, by the function that was called in their place."""


def public(thing: T) -> T:
    """Set ``__module__`` of a class or function to "fastrack", for tracebacks, pickles and documentation."""
    if isinstance(thing, FunctionType):
        thing = explained(thing)
    thing.__module__ = "fastrack"
    return thing


def attest_public(thing: T) -> T:
    """Set ``__module__`` of a class or function to "fastrack.attest", like `public` for `fastrack`."""
    thing.__module__ = "fastrack.attest"
    return thing


def explained(function: F) -> F:
    """Have a call whose arguments do not fit raise TypeError with the way to call the function."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # by the function, to which the arguments did fit
            problem = str(error)
        raise TypeError(_explain(function, problem, kwargs)) from None

    return call  # type: ignore[return-value]


def _explain(function: Callable[..., Any], problem: str, given: Mapping[str, object]) -> str:
    from inspect import Parameter, Signature, signature  # deferred: few processes need it

    known = {name: each for name, each in signature(function).parameters.items() if name != "self"}
    usage = Signature([each.replace(annotation=Parameter.empty) for each in known.values()])
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    message = f"{name}() {problem.partition('() ')[2]}: expected {name}{usage}"
    advice = [f"Pass {_SINGULAR_AND_PLURAL[each]}=" for each in given if _SINGULAR_AND_PLURAL.get(each) in known]
    return ". ".join([message, *advice[:1], *([_ELSEWHERE[name]] if name in _ELSEWHERE else [])])


def lazy(
    package: str, names: Mapping[str, Sequence[str]], namespace: dict[str, Any], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its public names on first use.

    `names` has the modules of the package, each with its public names; ``__init__.pyi`` tells type checkers. Submodules
    are imported on first use too, but not listed by ``dir``: who asks for all that it lists, such as a debugger, would
    import frameworks, and fail where one is not installed.
    """
    homes = {name: f"{package}.{module}" for module, listed in names.items() for name in listed}

    def load(name: str) -> object:
        if name in submodules:
            return import_module(f"{package}.{name}")
        if name not in homes:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message)
        namespace[name] = value = getattr(import_module(homes[name]), name)
        return value

    return load, lambda: sorted({*namespace, *homes})
