from __future__ import annotations

import contextlib
import io

import pytest

from fastrack._cli import console
from fastrack._cli.console import clean, format_rate, pluralize, progress_bar
from fastrack._util.units import format_size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (256 << 20, "256 MiB"), (5 << 50, "5120.0 TiB")],
)
def test_a_size_is_written_in_powers_of_1024(count, text):
    assert format_size(count) == text


def test_a_pace_is_told_only_of_work_that_tells_one():
    assert format_rate(10**9, 0.5) == "0.50 s, 2.00 GB/s"
    assert format_rate(1000, 0.005) == "5.0 ms"


def test_one_is_no_plural():
    assert [pluralize(number, "tensor") for number in (0, 1, 2)] == ["0 tensors", "1 tensor", "2 tensors"]


@pytest.mark.parametrize("text", ["plain", "Ünïcode 漢字", "[brackets]"])
def test_what_can_be_printed_stays_as_it_is(text):
    assert clean(text) == text


@pytest.mark.parametrize("text", ["\x1b[2J", "\r", "\n", "\x9b", "\u2028", "\udc80", "\u202e"])
def test_what_drives_a_terminal_is_escaped(text):
    assert clean(text).isascii()
    assert clean(text).startswith("\\")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def work(fails=None):
    """What a terminal shows of three steps, the last of which may fail."""
    with contextlib.redirect_stderr(Terminal()) as screen, contextlib.suppress(ZeroDivisionError):  # noqa: SIM117
        with progress_bar("sealing", 30) as progress:
            progress(10)
            progress(10)
            progress(10 // (not fails))
    return screen.getvalue()


@pytest.fixture(autouse=True)
def _a_capable_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_a_bar_shows_work_that_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(console, "_DELAY", 0)
    assert "sealing" in work()
    assert capsys.readouterr().out == ""


def test_work_of_a_moment_shows_no_bar():
    assert work() == ""


def test_a_bar_goes_when_the_work_fails(monkeypatch):
    monkeypatch.setattr(console, "_DELAY", 0)
    assert work(fails=True).rindex("\x1b[?25h") > 0  # the cursor is back


def test_no_bar_is_drawn_into_a_file(monkeypatch, capsys):
    monkeypatch.setattr(console, "_DELAY", 0)
    with progress_bar("sealing", 30) as progress:
        progress(30)
    assert capsys.readouterr().err == ""
