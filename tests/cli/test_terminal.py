"""Lines on a terminal break between words, however narrow it is."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest

from fastrack import Key, save_file

LINES = (
    "inspect sealed.safetensors",
    "verify sealed.safetensors -k owner.key",
    "inspect owner.key",
    "key owner.key",
    "seal one.bin two.bin out.safetensors",
    "seal --help",
)


def shown(line, width):
    """Return what a command shows on a terminal of this width."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "fastrack", *line.split()]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment) as process:
        os.close(its)
        content = b""
        try:
            while part := os.read(ours, 65536):
                content += part
        except OSError:  # the process has ended
            pass
        os.close(ours)
        process.wait()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", content.decode())


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, pytest.param(40, marks=pytest.mark.nightly)])
def test_no_word_is_broken(folder, width):
    owner = Key.generate()
    owner.save("owner.key")
    names = ("encoder.layers.0.weight", "a name of several words", "b")
    save_file({name: np.ones((2, 3)) for name in names}, "sealed.safetensors", owner)
    for line in LINES:
        words = {word for word in shown(line, 1000).split() if word[0].isalpha() and len(word) > 2}
        words -= {"failed"}  # the heading of a column that is empty, and left out where it does not fit
        said = shown(line, width)
        narrow = {*said.split(), *(word.removesuffix(":") for word in said.split())}
        assert words - narrow == set(), (line, said)
        rows = said.partition("Examples:")[0].splitlines()  # behind which are lines to copy
        assert [row for row in rows if len(row) > width and len(row.split()) > 1] == [], (line, said)
    assert sorted(path.name for path in folder.iterdir()) == ["owner.key", "sealed.safetensors"]
