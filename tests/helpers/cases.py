"""Grids of cases that are one test, where `pytest.mark.parametrize` would make a test of each."""

import functools
import inspect
import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 200  # some cases have megabytes


def each(names, cases):
    """Run a test for each case in turn, with the fixtures of one test; a failure tells its case.

    Names and cases are those of `pytest.mark.parametrize`; the grids of several decorators are multiplied.
    """
    names = names.split(",") if isinstance(names, str) else names
    cases = [case if len(names) > 1 else (case,) for case in cases]
    if not cases:  # a test of nothing would pass
        raise ValueError(f"expected cases of {', '.join(names)}, got none")

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            for number, case in enumerate(cases):
                named = dict(zip(names, case, strict=True))
                try:
                    test(**fixtures, **named)
                except BaseException as error:
                    error.add_note(f"in case {number}: {_SHORT.repr(named)}")
                    raise

        parameters = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature([one for one in parameters if one.name not in names])
        return run

    return decorate
