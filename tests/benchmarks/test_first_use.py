"""`bench.first_use` measures new processes, by parts."""

import subprocess
import sys

import pytest

from bench import first_use


@pytest.mark.slow
def test_the_parts_make_up_the_time_from_start_to_result(capsys):
    times = first_use.measure([first_use.ROOT], 2, 1 << 16)
    ((checkout, parts),) = times.items()
    assert checkout == str(first_use.ROOT)
    for kind in (0, 1):
        for index in range(2):
            spent = {part: values[index][kind] for part, values in parts.items()}
            whole = spent.pop("total")
            spent.pop("warm")
            above = spent.pop("above")
            assert sum(spent.values()) == pytest.approx(whole)
            assert spent["numpy"] > 0
            assert spent["safetensors"] >= 0
            assert above == pytest.approx(whole - sum(spent[part] for part in first_use.BELOW))
            assert 0 < above < whole
    first_use.show(times)
    shown = capsys.readouterr().out
    assert "start to result" in shown
    assert "target 250" in shown


@pytest.mark.slow
def test_an_environment_is_measured_by_its_interpreter(tmp_path):
    command = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", tmp_path / "env"]
    subprocess.run(command, check=True)
    (purelib,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (purelib / "here.pth").write_text(
        "\n".join([str(first_use.ROOT), *(path for path in sys.path if "site-packages" in path)])
    )
    python = tmp_path / "env/bin/python"
    (parts,) = first_use.measure([python], 1, 1 << 16).values()
    assert 0 < parts["above"][0][1] < parts["total"][0][1]
    assert first_use.name_of(python) == "env"
