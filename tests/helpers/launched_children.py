"""Ways in which a program starts others, each of which reads a file of weights: which of them open a sealed one.

``python -m helpers.launched_children FOLDER [WAY...]`` prints a JSON document: for each way what the child read, or the
last line of its error.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import zipapp
from pathlib import Path

CODE = (
    "import sys; from safetensors.numpy import load_file; "
    "print(load_file(sys.argv[1] + '/model.safetensors')['b'].sum())"
)
FLAGS = {"-s", "-P", "-B", "-O", "-u", "-X dev", "-I", "-E", "-S"}
POOLS = {"fork", "spawn", "forkserver"}


def load(folder):
    from safetensors.numpy import load_file

    return str(load_file(folder + "/model.safetensors")["b"].sum())


def pooled(kind, folder):
    with multiprocessing.get_context(kind).Pool(1) as pool:
        return pool.apply(load, (folder,))


def started(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else ""


def ways(folder, scratch):
    """Return functions by the names of ways."""
    here = [sys.executable, "-c", CODE, folder]
    bare = {"PATH": os.environ["PATH"]}
    (scratch / "zipped").mkdir()
    for name in ("zipped/__main__.py", "script.py"):
        (scratch / name).write_text(CODE)
    zipapp.create_archive(scratch / "zipped", scratch / "zipped.pyz")
    (scratch / "foreign").mkdir()
    (scratch / "foreign/sitecustomize.py").write_text("import sys; sys.foreign = 'seen'")
    foreign = f"{CODE}; assert sys.foreign == 'seen' and 'foreign' in sys.modules['sitecustomize'].__file__"
    added = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{scratch / 'foreign'}"}
    through = f"import os; os.execv({sys.executable!r}, {here!r})"
    return {
        "itself": lambda: load(folder),
        **{kind: lambda kind=kind: pooled(kind, folder) for kind in POOLS},
        **{flag: lambda flag=flag: started(sys.executable, *flag.split(), *here[1:]) for flag in FLAGS},
        "subprocess": lambda: started(*here),
        "another folder": lambda: started(*here, cwd="/"),
        "a shell": lambda: started("sh", "-c", f'{sys.executable} -c "$0" "$1"', CODE, folder),
        "exec": lambda: started(sys.executable, "-c", through),
        "a script": lambda: started(sys.executable, str(scratch / "script.py"), folder),
        "a zipapp": lambda: started(sys.executable, str(scratch / "zipped.pyz"), folder),
        "a sitecustomize of its own": lambda: started(sys.executable, "-c", foreign, folder, env=added),
        "no environment": lambda: started(*here, env=bare),
        "env -i": lambda: started("env", "-i", *here),
        "another PYTHONPATH": lambda: started(*here, env={**os.environ, "PYTHONPATH": "/nowhere"}),
        "its bytes": lambda: started(sys.executable, "-c", "import sys; from safetensors.numpy import load; "
                                     "load(open(sys.argv[1] + '/model.safetensors', 'rb').read())", folder),
        "torchrun": lambda: started(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
                                    str(scratch / "script.py"), folder),
    }  # fmt: skip


def main(folder, *chosen):
    with tempfile.TemporaryDirectory() as scratch:
        known = ways(folder, Path(scratch))
        found = {}
        for name in chosen or [name for name in known if name != "torchrun"]:
            try:
                found[name] = known[name]()
            except Exception as error:  # noqa: BLE001 - of a pool
                found[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
