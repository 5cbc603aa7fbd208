import functools
import inspect
import reprlib

import pytest

Case = type(pytest.param())


def each(names, cases, ids=reprlib.repr):
    """Return a decorator that runs a test for each case as ``pytest.mark.parametrize`` would, but as one test.

    An error names its case in a note. ``tmp_path`` is another empty folder in each case, and what a case sets with
    ``monkeypatch`` is undone after it. All other fixtures are made once, so a test that needs a fresh one for each case
    is parametrized. ``pytest.param`` may give a case its name, but no mark. A function as ``cases`` makes a dictionary
    when the test runs: each value, or each pair of a name and a value, is a case.
    """
    names = names.split(",") if isinstance(names, str) else names
    is_one = len(names) == 1
    cases = cases if callable(cases) else list(cases)
    ids = ids if callable(ids) else list(ids)

    def named():
        """Return all cases with their names."""
        if callable(cases):
            made = [pytest.param(*pair[-len(names) :], id=pair[0]) for pair in cases().items()]
        else:
            made = [case if isinstance(case, Case) else pytest.param(*([case] if is_one else case)) for case in cases]
        assert all(len(case.values) == len(names) and not case.marks for case in made)
        if callable(ids):
            return [(case, case.id or ", ".join(str(ids(value)) for value in case.values)) for case in made]
        return zip(made, ids, strict=True)

    def decorate(function):
        @functools.wraps(function)
        def test(*args, **fixtures):
            found = list(named())
            assert found, f"expected cases of {', '.join(names)}, got none"  # a test of nothing would pass
            for number, (case, name) in enumerate(found):
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
                    error.add_note(f"case {number}: {name}")
                    raise

        # pytest would look for the names of the cases among its fixtures.
        signature = inspect.signature(function)
        parameters = [parameter for name, parameter in signature.parameters.items() if name not in names]
        test.__signature__ = signature.replace(parameters=parameters)
        del test.__wrapped__
        return test

    return decorate
