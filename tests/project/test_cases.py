import pytest
from helpers.cases import each


@each("setting", ["A", "B"])
@each(("number", "text"), [(1, "x"), pytest.param(2, "y", id="second")])
def test_every_case_has_a_folder_and_an_environment_of_its_own(
    setting, number, text, tmp_path, monkeypatch, pytestconfig
):
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text(text * number)
    monkeypatch.setattr(pytestconfig, setting, number, raising=False)
    assert not hasattr(pytestconfig, {"A": "B", "B": "A"}[setting])


@pytest.mark.parametrize(
    ("ids", "told"),
    [(repr, "case 2: 0, 'none'"), (["one", "two", "three", "four"], "case 2: three"), (str, "case 2: 0, none")],
)
def test_the_first_case_that_fails_is_named_and_no_other_follows(ids, told):
    done = []

    @each(("number", "name"), [(2, "two"), (1, "one"), (0, "none"), (3, "three")], ids=ids)
    def divide(number, name):
        done.append(name)
        return 1 / number

    with pytest.raises(ZeroDivisionError) as caught:
        divide()
    assert caught.value.__notes__ == [told]
    assert done == ["two", "one", "none"]

    @each("number", lambda: {"one": 1, "none": 0})
    def divide_by(number):
        return 1 / number

    with pytest.raises(ZeroDivisionError) as caught:
        divide_by()
    assert caught.value.__notes__ == ["case 1: none"]


def test_no_cases_and_those_that_do_not_fit_or_bear_marks_are_refused():
    for cases in [[], [(1, 2, 3)], [pytest.param(1, 2, marks=pytest.mark.slow)]]:
        test = each(("a", "b"), cases)(lambda a, b: None)
        with pytest.raises(AssertionError):
            test()
