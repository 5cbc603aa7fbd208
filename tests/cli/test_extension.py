"""`fastrack-bench` is loaded by its own name, for its own commands, and in the version that fits."""

import json
import sys
from importlib.metadata import distribution

import pytest
from helpers.commands import application

import fastrack
from fastrack._cli import extension

MISSING = f"error: fastrack-bench is not installed: pip install fastrack-bench=={fastrack.__version__}\n"


@pytest.fixture
def missing(hide):
    hide("fastrack_bench")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a distribution, whose modules may not be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(folder, name, version=fastrack.__version__, module="evil", commands=("plan", "bench", "seal")):
        info = tmp_path / f"{folder}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = ["[fastrack.commands]", *(f"{command} = {module}:app" for command in commands)]
        (info / "entry_points.txt").write_text("\n".join(lines))
        (tmp_path / f"{module}.py").write_text("raise SystemExit('loaded')")

    return install


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize(
    "line",
    [
        "plan",
        "plan --help",
        "plan transfer --size 1MiB",
        "help plan",
        "bench --toll all",
        "bench --toll=all",
        "bench --size 1 --collectives",
        "bench --workloads",
        "bench --visits",
        "bench --ranks 2",
        "bench --compute h100",
        "bench --bucket-cap-mb 25",
    ],
)
def test_without_it_one_line_says_how_to_get_it(cli, line):
    done = cli(line, status=1)
    assert (done.stdout, done.stderr) == ("", MISSING)


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("line", ["plan transfer --json", "bench --toll all --json -"])
def test_without_it_a_program_gets_a_document(cli, line):
    done = cli(line, status=1)
    assert f"error: {json.loads(done.stdout)['error']['message']}\n" == MISSING


@pytest.mark.usefixtures("missing")
def test_without_it_help_lists_what_is_there(cli):
    assert "  plan " not in cli("--help").stdout
    for line in ("bench --help", "help bench"):
        assert "--size" in cli(line).stdout
        assert "--toll" not in cli(line).stdout
    assert "did you mean --toll?" in cli("bench --tol all", status=2).stderr


def test_with_it_help_lists_all(cli):
    pytest.importorskip("fastrack_bench")
    assert "  plan " in cli("--help").stdout
    for line in ("bench --help", "bench --help-all", "help bench"):
        assert "--toll" in cli(line).stdout


def test_no_other_command_loads_it(cli, installed):
    installed("fastrack_bench", "fastrack-bench")
    for line, status in (("bench --size 0", 2), ("seal --help", 0), ("doctor --help", 0), ("--help", 0), ("help", 0)):
        cli(line, status=status)
    with pytest.raises(SystemExit, match="loaded"):
        extension.load("plan")


def test_what_another_distribution_claims_is_not_loaded(cli, installed):
    installed("evil", "evil", commands=("plan", "bench", "seal", "evil"))
    assert "evil" not in cli("--help").stdout
    assert "no command 'evil'" in cli("evil", status=2).stderr
    for line in ("seal --help", "bench --help"):
        cli(line)
    assert "evil" not in sys.modules


@pytest.mark.parametrize(("name", "version"), [("evil", fastrack.__version__), ("fastrack-bench", "0.0.1")])
def test_another_name_or_version_is_refused(cli, installed, name, version):
    installed("fastrack_bench", name, version)
    for line in ("plan transfer", "bench --toll all"):
        told = f"{name} {version} does not fit: expected fastrack-bench {fastrack.__version__}, as fastrack-io has"
        assert told in cli(line, status=1).stderr
    assert "  plan " not in cli("--help").stdout
    assert "--toll" not in cli("bench --help").stdout
    assert "evil" not in sys.modules


def test_the_options_that_are_added_are_those_that_it_has():
    pytest.importorskip("fastrack_bench")
    import typer

    bench = typer.main.get_command(application()).commands["bench"]
    own, whole = (
        {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        for command in (bench, bench.whole())
    )
    assert whole - own == set(bench.added)
    assert own <= whole
    found = distribution("fastrack-bench").entry_points
    assert {each.name for each in found} == extension.COMMANDS.keys()


@pytest.mark.parametrize("commands", [(), ("plan", "bench", "qualify")], ids=["no entry points", "no modules"])
def test_a_part_of_it_is_told_with_what_to_type(cli, installed, tmp_path, commands):
    installed("fastrack_bench", "fastrack-bench", commands=commands)
    (tmp_path / "evil.py").unlink()
    told = f"in part: pip install --force-reinstall --no-deps fastrack-bench=={fastrack.__version__}"
    for line in ("qualify folder", "plan", "bench --toll all", "bench --help", "help bench"):
        assert cli.error(line) == f"error: fastrack-bench is installed {told}\n"
