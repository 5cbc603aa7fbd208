"""A writer of sealed blocks that is killed while it writes one."""

import os
import signal

from fastrack.kv import _folder


def killed_at(block, action):
    """Run `action()` in a forked child, which is killed when it has written nine bytes of that block, from 0 on."""
    child = os.fork()
    if child == 0:
        write, count = os.write, [0]

        def cut(descriptor, data):
            count[0] += 1
            done = write(descriptor, data if count[0] <= block else data[:9])
            if count[0] > block:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        _folder.os.write = cut
        try:
            action()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
