"""The boxes of worker threads, to look into, and boxes that no thread serves."""

import ctypes
import threading
from pathlib import Path

from fastrack._crypto import workers

MAX = workers._COUNT


class Box:
    """The words of a box."""

    def __init__(self, boxes, number):
        self._words = (ctypes.c_int64 * (workers.BOX_SIZE // 8)).from_address(boxes + workers.BOX_SIZE * (number + 1))

    def __getitem__(self, word):
        return self._words[word]

    def __setitem__(self, word, value):
        self._words[word] = value

    @property
    def state(self):
        return self[workers.STATE]


def all_boxes(boxes=None):
    """Return the boxes of this process, or of others that `unserved` made."""
    boxes = boxes or workers._boxes
    return [Box(boxes, number) for number in range(ctypes.c_int64.from_address(boxes).value)]


def replace_boxes(patch, boxes):
    """Have calls of this process look into other boxes. Return them."""
    patch.setattr(workers, "_boxes", boxes)
    return boxes


def unserved(count, state=workers.FREE):
    """Return the address of new boxes in a state, as if they had threads, which sleep for ever."""
    boxes = workers._new_boxes(count)
    sleeper = threading.Thread(target=threading.Event().wait, daemon=True)
    sleeper.start()
    for box in all_boxes(boxes):
        box[workers.THREAD] = sleeper.ident
        box[workers.STATE] = state
    return boxes


def native_threads():
    """Return the ids of the threads of this process, those outside the interpreter included."""
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}
