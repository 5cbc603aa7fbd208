"""Commands whose output is full or has no reader end with their status, at most one line more, and no plaintext."""

import functools
import shutil
import signal
from pathlib import Path

import pytest
from helpers.commands import invoke
from helpers.every_command import COMMANDS, FAILING, KEY, READING, SECRET, contents, every_command, prepare, words_of
from helpers.forked_commands import CLOSED, FULL, running
from helpers.tour_files import Tour, lines_of

pytestmark = pytest.mark.skipif(not Path(FULL).exists(), reason="needs a device that is full")

LINES = {
    **COMMANDS,
    **READING,
    **FAILING,
    "index": "index data",
    "bench, of collectives": "bench --collectives --ranks 2 --size 0.01 --repeat 1",
    "demo": "demo --size 0.0625 --repeat 1 --directory demo --picture TARGET.png",
    "plan measure": "plan measure TARGET",
    "qualify": f"qualify folder {KEY}",
    "broker quarantine": f"broker quarantine {'a' * 32} --unseen --why lost --database broker.db",
    "broker lift": f"broker lift {'a' * 32} --why found --database broker.db",
    "tour stop": "tour stop --why lost --database broker.db",
    "tour run": "tour run toured/v0 toured/out --config toured/run.toml",
    "the version": "--version",
    "no command": "encript notes.txt",
    "nothing": "",
    "no option": "seal --recursiv study TARGET",
}
QUICK = ("keygen", "unseal", "unseal a folder", "unseal file by file", "inspect", "verify", "help")
TAKES_JSON = {name for name, command in every_command().items() if any("--json" in it.opts for it in command.params)}


def command_of(name):
    """Return the words of the command of a line, without its arguments."""
    words = LINES[name].split()
    return next((known for known in (" ".join(words[:2]), words[0] if words else "") if known in every_command()), "")


ROWS = {
    **LINES,
    **{f"{name}, as JSON": f"{line} --json" for name, line in LINES.items() if command_of(name) in TAKES_JSON},
    **{f"{name} --help": f"{name} --help" for name in every_command()},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = prepare(tmp_path_factory.mktemp("prepared"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        invoke(words_of(COMMANDS["import"].replace("TARGET", "data"), folder))
    (folder / "toured").mkdir()
    (folder / "toured/run.toml").write_text("\n".join(lines_of(Tour(folder / "toured", "a"))))
    return folder


@pytest.fixture(scope="module")
def run():
    with running() as run:
        yield run


@pytest.fixture(scope="module")
def attempt(run, prepared, tmp_path_factory):
    """Run a line in a new folder, once for each output: its status, what it printed, and the plaintext that it left."""
    tmp_path = tmp_path_factory.mktemp("attempts")

    @functools.cache
    def attempt(line, **options):
        shutil.rmtree(folder := tmp_path / "folder", ignore_errors=True)  # that of an attempt which failed, too
        shutil.copytree(prepared, folder)
        before = contents(folder)
        files = {name: str(tmp_path / name) for name in ("stdout", "stderr")}
        status = run(words_of(line, folder), folder, **(files | options))
        assert status >= 0, f"ended by {signal.Signals(-status).name}, and not by itself"
        said = [Path(file).read_text() if name not in options else "" for name, file in files.items()]
        assert not any(word in text for text in said for word in ("Traceback", "Exception ignored", "defect"))
        left = [name for name, content in contents(folder).items() if SECRET in content and name not in before]
        return status, *said, left

    return attempt


@pytest.mark.slow
def test_every_command_has_a_row():
    assert {command_of(name) for name in LINES} == every_command().keys() | {""}


def rows(*, quick=(), slow=()):
    """Return the rows as parameters. All but some are for the night, as are those that measure."""
    night = {name for name in ROWS if name.startswith(("bench", "demo")) and not name.endswith("--help")}
    marks = dict.fromkeys(ROWS, pytest.mark.nightly) | {name: pytest.mark.slow for name in slow if name not in night}
    marks |= dict.fromkeys(quick, ())
    return [pytest.param(name, marks=marks[name]) for name in ROWS]


def check(attempt, name, output, **options):
    meant, printed, said, _ = attempt(ROWS[name])
    status, _, told, left = attempt(ROWS[name], stdout=output, **options)
    if not printed:
        assert (status, told.count("\n")) == (meant, said.count("\n"))
        return
    # A pipe without a reader ends what made no plaintext, and no key, as it ends other programs.
    assert status in {meant or 1, 141 if output == CLOSED and not meant else 1}
    assert left == []
    assert 0 <= told.count("\n") - said.count("\n") <= 1
    if meant == 0 and output == FULL:
        assert told.splitlines()[-1].startswith("error: standard output: No space left on device")


@pytest.mark.parametrize("name", rows(quick=QUICK, slow=COMMANDS))
@pytest.mark.slow
def test_a_full_output_fails_the_command(attempt, name):
    check(attempt, name, FULL)


@pytest.mark.parametrize("name", rows(slow=QUICK))
def test_an_output_without_a_buffer_fails_it_too(attempt, name):
    check(attempt, name, FULL, has_buffer=False)


@pytest.mark.parametrize("name", rows(slow=(*QUICK, "a wrong key for files", "a wrong key, as JSON")))
@pytest.mark.parametrize("has_buffer", [True, False], ids=["buffered", "unbuffered"])
def test_an_output_that_nobody_reads_fails_it_as_well(attempt, name, has_buffer):
    check(attempt, name, CLOSED, has_buffer=has_buffer)


@pytest.mark.parametrize("name", rows())
@pytest.mark.parametrize("output", [FULL, CLOSED])
def test_what_standard_error_does_not_take_changes_nothing(attempt, name, output):
    meant, printed, _, made = attempt(ROWS[name])
    status, also, _, left = attempt(ROWS[name], stderr=output)
    assert (status, bool(also), left) == (meant, bool(printed), made)
