import sys

import pytest
from helpers.processes import run_python

from fastrack._util.extras import require


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    require("json", "this", "torch")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"^fastrack.ray needs ray, .* pip install 'fastrack-io\[ray\]'$"):
        require("ray", "fastrack.ray", "ray")


def test_a_package_that_lacks_one_of_its_own_says_which(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import absent_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="absent_package"):
        require("broken_package", "this", "torch")


@pytest.mark.parametrize(
    ("line", "package", "extra"),
    [
        ("import fastrack.distributed", "torch", "torch"),
        ("import fastrack.ray", "ray", "ray"),
        ("import fastrack; fastrack.load_model(None, 'x')", "torch", "torch"),
    ],
)
def test_public_parts_that_take_a_package_say_so_without_it(line, package, extra):
    said = run_python(
        f"import sys; sys.modules[{package!r}] = None\n"
        f"try:\n    {line}\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    assert f"pip install 'fastrack-io[{extra}]'" in said
