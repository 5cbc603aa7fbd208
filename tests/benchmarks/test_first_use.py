"""`bench.first_use` measures new processes, by parts."""

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
            assert sum(spent.values()) == pytest.approx(whole)
            assert spent["numba"] == spent["scipy"] == 0
            assert spent["numpy"] > 0
    first_use.show(times)
    assert "start to result" in capsys.readouterr().out
