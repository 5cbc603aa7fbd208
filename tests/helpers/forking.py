"""Runs a function in a forked child, which answers through a pipe or is killed."""

import os
import pickle
import signal
import warnings


def in_forked_child(action, seconds=60):
    """The pickled result of `action()` in a child that has at most `seconds`."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads about is what is tested
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler of Python waits for native code that may hang
            signal.alarm(seconds)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(pickle.dumps(action()))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"
    return pickle.loads(answer)
