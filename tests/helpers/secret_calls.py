"""Calls functions of extension modules on secret memory, under valgrind. It imports little, to start fast.

Its arguments are the library of `secret_marks.c`, and a file with a JSON array of cases. A case has a `name`, the path
of a `module`, `memory`, the names of what is `secret` of it, and `calls`. Memory has a name, and is given in
hexadecimal or as words, some of which are the names of memory before it, for its address. A call has the name of a
function and arguments: integers, names for addresses, and `[name]` for the memory itself.

It prints, of each case, what the calls returned, how many bytes of its memory are secret then, and that memory.
"""

import ctypes
import json
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader

ALIGNMENT = 64

marks = ctypes.PyDLL(sys.argv[1])
marks.call.argtypes, marks.call.restype = (ctypes.py_object, ctypes.py_object), ctypes.py_object
marks.hide.argtypes = marks.show.argtypes = marks.count_hidden.argtypes = ctypes.c_void_p, ctypes.c_size_t
marks.note.argtypes = (ctypes.c_char_p,)


def run(name, module, memory, secret, calls):
    functions = module_from_spec(spec_from_loader("_native", ExtensionFileLoader("_native", module)))
    allocated = {}

    def word(value):
        return ctypes.addressof(allocated[value]) if isinstance(value, str) else value

    for key, content in memory.items():
        is_text = isinstance(content, str)
        words = () if is_text else (word(value).to_bytes(8, "little", signed=True) for value in content)
        allocated[key] = allocate(bytes.fromhex(content) if is_text else b"".join(words))
    for key in secret:
        marks.hide(word(key), len(allocated[key]))
    marks.note(name.encode())
    returned = []
    for function, arguments in calls:
        given = (allocated[value[0]] if isinstance(value, list) else word(value) for value in arguments)
        returned.append(marks.call(getattr(functions, function), tuple(given)))
    hidden = {key: marks.count_hidden(word(key), len(each)) for key, each in allocated.items()}
    for key, each in allocated.items():
        marks.show(word(key), len(each))
    shown = {key: bytes(each).hex() for key, each in allocated.items()}
    return {"returned": returned, "hidden": hidden, "memory": shown}


def allocate(data):
    room = ctypes.create_string_buffer(len(data) + ALIGNMENT)
    memory = (ctypes.c_char * len(data)).from_buffer(room, -ctypes.addressof(room) % ALIGNMENT)
    memory.raw = data
    return memory


if __name__ == "__main__":
    with open(sys.argv[2]) as file:  # noqa: PTH123 - `pathlib` takes a while to import here
        json.dump([run(**case) for case in json.load(file)], sys.stdout)
