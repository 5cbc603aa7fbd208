import functools
import inspect
import reprlib

import pytest

Case = type(pytest.param())


def each(names, cases, ids=reprlib.repr):
    """Return a decorator that runs a test for each case as ``pytest.mark.parametrize`` would, but as one test.

    An error names its case in a note. ``tmp_path`` is another empty folder in each case, and what a case sets with
    ``monkeypatch`` is undone after it. All other fixtures are made once, so a test that needs a fresh one for each case
    is parametrized. ``pytest.param`` may give a case its name, but no mark.
    """
    names = names.split(",") if isinstance(names, str) else names
    if len(names) == 1:
        cases = [case if isinstance(case, Case) else [case] for case in cases]
    cases = [case if isinstance(case, Case) else pytest.param(*case) for case in cases]
    assert all(len(case.values) == len(names) and not case.marks for case in cases)
    if not callable(ids):
        cases = [case._replace(id=name) for case, name in zip(cases, ids, strict=True)]

    def decorate(function):
        @functools.wraps(function)
        def test(*args, **fixtures):
            for number, case in enumerate(cases):
                own = dict(fixtures)
                if "tmp_path" in own:
                    own["tmp_path"] /= str(number)
                    own["tmp_path"].mkdir()
                try:
                    with pytest.MonkeyPatch.context() as monkeypatch:
                        if "monkeypatch" in own:
                            own["monkeypatch"] = monkeypatch
                        function(*args, **own, **dict(zip(names, case.values, strict=True)))
                except BaseException as error:
                    error.add_note(f"case {number}: {case.id or ', '.join(str(ids(value)) for value in case.values)}")
                    raise

        # pytest would look for the names of the cases among its fixtures.
        signature = inspect.signature(function)
        parameters = [parameter for name, parameter in signature.parameters.items() if name not in names]
        test.__signature__ = signature.replace(parameters=parameters)
        del test.__wrapped__
        return test

    return decorate
