import contextlib
import io
import time
from types import SimpleNamespace

import pytest

from fastrack._cli import console
from fastrack._util.shown import format_size


def test_sizes_rates_and_counts_are_written_for_people():
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 256 << 20: "256 MiB", 5 << 50: "5120.0 TiB"}
    assert {count: format_size(count) for count in sizes} == sizes
    assert console.format_rate(10**9, 0.5) == "0.50 s, 2.00 GB/s"
    assert console.format_rate(1000, 0.005) == "5.0 ms"  # too short to tell a rate
    assert [console.pluralize(number, "tensor") for number in (0, 1, 2)] == ["0 tensors", "1 tensor", "2 tensors"]


def test_what_drives_a_terminal_is_escaped_and_all_else_stays():
    for text in ("plain", "Ünïcode 漢字", "[brackets]"):
        assert console.clean(text) == text
    for text in ("\x1b[2J", "\r", "\n", "\x9b", "\u2028", "\udc80", "\u202e"):
        assert console.clean(text).isascii()
        assert console.clean(text).startswith("\\")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def work(fails=None):
    """Record the terminal's output of three steps, the last of which may fail."""
    with contextlib.redirect_stderr(Terminal()) as screen, contextlib.suppress(ZeroDivisionError):  # noqa: SIM117
        with console.progress_bar("sealing", 30) as progress:
            progress(10)
            progress(10)
            progress(10 // (not fails))
    return screen.getvalue()


@pytest.fixture(autouse=True)
def _a_capable_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_a_bar_shows_work_that_takes_long_until_it_is_over_or_fails(limited, capsys):
    assert work() == ""
    limited(bar_delay=0)
    assert "sealing" in work()
    assert capsys.readouterr().out == ""
    assert work(fails=True).rindex("\x1b[?25h") > 0  # the cursor is back


def test_a_bar_appears_during_a_step_that_takes_long(limited):
    limited(bar_delay=0.01)
    with contextlib.redirect_stderr(Terminal()) as screen, console.progress_bar("sealing", 30):
        deadline = time.monotonic() + 30
        while "sealing" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "sealing" in screen.getvalue()


def test_a_bar_of_many_files_counts_them(limited):
    limited(bar_delay=0)
    with contextlib.redirect_stderr(Terminal()) as screen, console.progress_bar("sealing", 30, files=1_200) as progress:
        progress(10, files=1)
        progress(10, files=1_000)
    assert "sealing 1,001/1,200 files" in screen.getvalue()


def test_no_bar_is_drawn_into_a_file(limited, capsys):
    limited(bar_delay=0)
    with console.progress_bar("sealing", 30) as progress:
        progress(30)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_plaintext_whose_report_cannot_be_told_is_removed_and_no_other(tmp_path, monkeypatch, error):
    for name in ("one", "two", "other"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "folder").mkdir()
    written = [tmp_path / "link", tmp_path / "two", tmp_path / "folder"]

    def flush():
        raise error

    monkeypatch.setattr("sys.stdout", SimpleNamespace(flush=flush))
    with (
        pytest.raises(OSError, match=f"^standard output: {error.strerror}; .* removed again"),
        console.taken_back(written),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir() if path.exists()] == ["other"]


def shown_failures(monkeypatch, stream, **variables):
    """Return what a stream gets of an error, and of a table and a line of failures."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(stream):
        console.note("error: x: expected FAILED here, got error: y")
        table = console.new_table("", "name")
        table.add_row("FAILED", "x")
        console.print_lines([table, "1 of 2 FAILED"])
    return stream.getvalue()


def test_what_failed_is_red_on_a_terminal(monkeypatch):
    said = shown_failures(monkeypatch, Terminal())
    assert said.startswith("\x1b[31merror:\x1b[0m x: expected \x1b[31mFAILED\x1b[0m here, got error: y\n")
    assert said.count("\x1b[31mFAILED\x1b[0m") == 3


def test_there_are_no_colours_in_files_and_pipes_and_where_they_are_not_wanted(monkeypatch):
    plain = shown_failures(monkeypatch, io.StringIO())
    assert "\x1b" not in plain
    assert plain.startswith("error: x: expected FAILED here, got error: y\n")
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        assert "\x1b[31m" not in shown_failures(monkeypatch, Terminal(), **variables)


def test_colours_can_be_forced(monkeypatch):
    assert "\x1b[31merror:" in shown_failures(monkeypatch, io.StringIO(), FORCE_COLOR="1")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        console.print_error({"message": "FAILED"}, ["error: FAILED"], as_json=True)
    assert "\x1b" not in out.getvalue()
