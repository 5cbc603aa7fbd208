"""Seal and open with the fastrack of this environment, and print what did so: ``python -I inside.py [CODE WHEN]``.

CODE is a program that uses other packages. It runs in this process, and WHEN is "first" or "then": before fastrack is
imported, or after it has sealed and opened, which it does again.
"""

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

COMPILERS = ("llvmlite", "numba")


def main(code="", when=""):
    if when == "first":
        exec(code, {})
    sealed_and_opened()
    loaded = [name for name in COMPILERS if name in sys.modules]
    if when == "then":
        exec(code, {})
        sealed_and_opened()
    import fastrack
    from fastrack._crypto import engine, native

    report = {
        "version": fastrack.__version__,
        "path": fastrack.__file__,
        "engine": engine.selected_engine().name,
        "fault": engine.selected_engine().fault,
        "made_by": native.module_facts(native.load()),
        "loaded": loaded,
        "installed": [name for name in COMPILERS if find_spec(name)],
    }
    sys.stdout.write(json.dumps(report) + "\n")


def sealed_and_opened():
    import numpy as np

    import fastrack

    key = fastrack.Key.generate()
    table = np.arange(3_000_000, dtype=np.float32).reshape(1000, 3000)
    sealed = fastrack.seal(table, key)
    assert (fastrack.unseal(sealed, key, framework="numpy") == table).all()
    assert (fastrack.to_device(sealed[5:900:7], keys=key, framework="numpy") == table[5:900:7]).all()
    bad = np.frombuffer(sealed.message, np.uint8).copy()
    bad[-1] ^= 1
    try:
        fastrack.unseal(fastrack.SealedTensor(sealed.context, bad, key.id), key, framework="numpy")
    except fastrack.AuthenticationError:
        pass
    else:
        raise SystemExit("a forgery was opened")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sealed.safetensors")
        fastrack.save_file({"table": table}, path, key=key)
        tensor = fastrack.load_file(path)["table"]
        assert (fastrack.to_device(tensor, keys=key, framework="numpy") == table).all()


if __name__ == "__main__":
    main(*sys.argv[1:])
