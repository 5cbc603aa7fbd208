"""`fastrack run`: programs that know nothing of fastrack open sealed folders, and what their launcher does for them."""

import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import launched_children
from helpers.range_server import RangeServer
from helpers.tampering import tamper_file
from helpers.traced_writes import trace
from safetensors.numpy import save_file

from fastrack import Anchor, Key, publish, seal_folder
from fastrack._keys.leases import LeasePage, Moment
from fastrack._models import launcher
from fastrack.grants import Signer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, memfd and locks of folders")

RNG = np.random.default_rng(53)
WEIGHTS = {"a": RNG.standard_normal((64, 64), np.float32), "b": np.arange(10)}
SUM = "45"
READ = launched_children.CODE
KEYS = "import json, os; told, = json.load(open(os.environ['FASTRACK_RUN'] + '/run.json')).values(); "


class Place:
    """A folder with a sealed model, and what starts programs in it."""

    def __init__(self, path):
        self.path, self.key = path, Key.generate()
        self.key.save(path / "owner.key")
        Key.generate().save(path / "kv.key")
        self.seal("sealed")
        (path / "tmp").mkdir(mode=0o700)
        self.env = {
            **os.environ,
            "TMPDIR": str(path / "tmp"),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and "python3" not in path),
        }
        self.env.pop("FASTRACK_KEY_FILE", None)

    def seal(self, name, *, spoken=False, **changed):
        plain = self.path / "plain"
        plain.mkdir()
        save_file(WEIGHTS | changed, plain / "model.safetensors", metadata={"format": "pt"})
        (plain / "config.json").write_text('{"layers": 1}')
        if spoken:
            (plain / "spm.model").write_bytes(b"words")
        seal_folder(plain, self.path / name, self.key)
        shutil.rmtree(plain)

    def words(self, *program, folders=("sealed",), key=("--key", "owner.key"), options=()):
        return [sys.executable, "-m", "fastrack", "run", *folders, *key, *options, "--", *program]

    def begin(self, *program, env=(), stdin=subprocess.DEVNULL, **options):
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        words = self.words(
            *program, **{name: options.pop(name) for name in ("folders", "key", "options") if name in options}
        )
        return subprocess.Popen(words, cwd=self.path, env=self.env | dict(env), text=True, **pipes, **options)

    def run(self, *program, status=0, **options):
        with self.begin(*program, **options) as process:
            out, said = process.communicate(timeout=120)
        assert process.returncode == status, said
        return out.strip() if status == 0 else said

    def python(self, code, *arguments, **options):
        return self.run(sys.executable, "-c", code, *(arguments or ("sealed",)), **options)

    def slots(self):
        return [path for base in (self.path / "tmp").glob("fastrack-run-*") for path in base.iterdir()]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def opens(found):
    return {name for name, said in found.items() if said == SUM}


REFUSED = {"-I", "-E", "no environment", "env -i", "another PYTHONPATH", "its bytes"}


def check_children(place, *chosen):
    with tempfile.TemporaryDirectory() as short:  # a forkserver's socket has to fit into 108 bytes
        words = sys.executable, "-m", "helpers.launched_children", "sealed", *chosen
        found = json.loads(place.run(*words, env={"TMPDIR": short}))
    for name, said in found.items():
        if name in REFUSED:
            assert "sealed by fastrack: open it with" in said, (name, said)
        elif name == "-S":
            assert said == "ModuleNotFoundError: No module named 'safetensors'"
        else:
            assert said == SUM, (name, said)
    return set(found)


@pytest.mark.slow
def test_a_program_and_its_children_open_a_sealed_folder_or_are_refused_by_name(place):
    assert check_children(place, "itself", "fork", "subprocess", "-I", "no environment")


@pytest.mark.slow
def test_each_way_to_start_a_child_opens_or_is_refused_by_name(place):
    assert len(check_children(place)) >= 22


@pytest.mark.nightly
def test_ranks_of_torchrun_open_a_sealed_folder(place):
    pytest.importorskip("torch")
    check_children(place, "torchrun")


@pytest.mark.slow
def test_a_process_that_imports_no_safetensors_imports_nothing_of_fastrack(place):
    code = (
        "import importlib.util, sys, os; importlib.util.find_spec('safetensors'); "  # as diffusers asks first
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('fastrack', 'numpy')]; "
        "assert not [path for path in sys.path if 'children' in path]; " + READ
    )
    assert place.python(code) == SUM


@pytest.mark.slow
def test_the_path_of_a_folder_is_the_same_at_each_start_and_apart_for_another_version(place):
    code = "import os, sys; print(os.path.realpath(sys.argv[1]))"
    path = place.python(code)
    assert place.python(code) == path
    assert Path(path).name == "sealed"
    shutil.rmtree(place.path / "sealed")
    place.seal("sealed")
    assert place.python(code) != path
    assert place.slots() == []


@pytest.mark.slow
def test_a_command_names_folders_by_words_behind_equals_signs_and_with_what_is_in_them(place):
    code = "import sys; print(*sys.argv[1:], sep='\\n')"
    words = ["sealed", "sealed/", "--model=sealed/config.json", "a=b=sealed", str(place.path / "sealed"), "unsealed"]
    first, *others = place.python(code, *words).splitlines()
    assert first.startswith(str(place.path / "tmp"))
    assert others == [f"{first}/", f"--model={first}/config.json", f"a=b={first}", first, "unsealed"]


@pytest.mark.slow
def test_a_folder_that_no_argument_names_is_refused_without_a_link(place):
    said = place.run("touch", "started", status=2)
    assert said == (
        "error: FOLDER: expected 'sealed' in an argument of the command, got none. Name it there, or as FOLDER=PATH "
        "with the path that the program reads\n"
    )
    assert not (place.path / "started").exists()


@pytest.mark.slow
def test_a_link_is_there_while_the_program_runs_and_takes_the_place_of_nothing(place):
    link = place.path / "link"
    assert place.python(READ, str(link), folders=[f"sealed={link}"]) == SUM
    assert not os.path.lexists(link)
    link.write_text("mine")
    assert place.python(READ, str(link), folders=[f"sealed={link}/"], status=1) == f"error: {link}: File exists\n"
    assert link.read_text() == "mine"
    assert place.slots() == []


@pytest.mark.slow
def test_a_folder_has_as_many_links_as_are_named_and_a_word_of_its_own(place):
    links = [str(place.path / name) for name in ("first", "second")]
    read = f"import sys; sys.argv[1:] = sys.argv[2:]; {READ}"
    code = f"import sys\nwhile len(sys.argv) > 1:\n    exec({READ!r}); sys.argv.pop(1)"
    assert place.python(code, *links, folders=[f"sealed={link}" for link in links]).split() == [SUM] * 2
    assert place.python(code, links[0], "sealed", folders=["sealed", f"sealed={links[0]}"]).split() == [SUM] * 2
    place.seal(Path(sys.executable).name)
    words = [Path(sys.executable).name] * 2
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert place.run(words[0], "-c", read, "x", words[0], folders=words[:1], env={"PATH": path}) == SUM


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("no key", 5),
        ("a missing shard", 4),
        ("no key file", 5),
        ("no key of blocks", 5),
        pytest.param("a text for a key of blocks", 5, marks=pytest.mark.slow),
        pytest.param("another key", 5, marks=pytest.mark.slow),
        pytest.param("an altered file", 4, marks=pytest.mark.slow),
        pytest.param("no folder", 6, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_nothing_starts_if_a_folder_does_not_open(place, given, status):
    options = {"key": []} if given == "no key" else {"key": ["--key", "kv.key"]} if given == "another key" else {}
    if given == "a missing shard":
        (place.path / "sealed/model.safetensors").unlink()
    if given == "an altered file":
        (place.path / "sealed/config.json").write_text('{"layers": 2}')
    if given == "no folder":
        options["folders"] = ["elsewhere"]
    if given == "no key file":
        options["key"] = ["--key", "missing.key"]
    if given == "no key of blocks":
        options["options"] = ["--kv-key", "missing.key"]
    if given == "a text for a key of blocks":
        options["options"] = ["--kv-key", "sealed/config.json"]
    said = place.run("touch", "started", "sealed", status=status, **options)
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not (place.path / "started").exists()
    assert place.slots() == []


@pytest.mark.slow
def test_another_folder_in_the_place_of_one_that_runs_is_refused(place):
    place.seal("other", b=np.arange(20))
    code = "import os; os.rename('sealed', 'before'); os.rename('other', 'sealed'); " + READ
    said = place.python(code, status=1)
    assert "expected the folder that `fastrack run` opened, got another one" in said


@pytest.mark.slow
def test_an_older_folder_is_refused_with_an_anchor(place):
    signer, anchor = Signer.generate(), place.path / "model.anchor"
    publish(place.path / "sealed", signer=signer)
    Anchor.create(anchor, owner=signer.verifier)
    shutil.copytree(place.path / "sealed", place.path / "older")
    for name in ("model.safetensors", "config.json", "fastrack.folder"):
        (place.path / "sealed" / name).unlink()
    place.seal("newer")
    for path in (place.path / "newer").iterdir():
        path.rename(place.path / "sealed" / path.name)
    publish(place.path / "sealed", signer=signer)
    assert place.python(READ, options=["--anchor", "model.anchor"]) == SUM
    said = place.python(READ, "older", folders=["older"], options=["--anchor", "model.anchor"], status=4)
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_chunk_that_was_altered_fails_the_program_and_is_told(place):
    tamper_file(place.path / "sealed/model.safetensors", "b", -1)
    swallowed = f"try:\n    exec({READ!r})\nexcept Exception: pass"
    said = place.python(READ, status=1)
    assert "AuthenticationError" in said
    with place.begin(sys.executable, "-c", swallowed, "sealed") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "chunk" in said  # though the program said nothing


@pytest.mark.slow
def test_a_key_of_a_descriptor_is_neither_in_arguments_nor_in_the_environment(place):
    (place.path / "secret").write_text((place.path / "owner.key").read_text().split(":")[1].strip())
    descriptor = os.open(place.path / "owner.key", os.O_RDONLY)
    code = (
        "import os; pids = os.getpid(), os.getppid()\n"
        "names = [f'/proc/{each}/{name}' for each in pids for name in ('cmdline', 'environ')]\n"
        "assert not any(open('secret', 'rb').read() in open(name, 'rb').read() for name in names)\n"
        f"assert not os.path.exists('/proc/self/fd/{descriptor}')\n{READ}"
    )
    try:
        assert place.python(code, key=["--key", f"fd:{descriptor}"], pass_fds=[descriptor]) == SUM
    finally:
        os.close(descriptor)
    with (place.path / "owner.key").open() as file:
        assert place.python(READ, key=["--key", "-"], stdin=file) == SUM
    assert place.python(READ, key=[], env={"FASTRACK_KEY_FILE": "owner.key"}) == SUM


@pytest.mark.slow
def test_memory_with_a_key_takes_no_writes_and_is_of_one_user(place):
    code = (
        KEYS + "path = told['blocks']['random']\n"
        "assert open(path).read().startswith('# fastrack key')\n"
        "try:\n    os.write(os.open(path, os.O_WRONLY), b'x'); raise SystemExit('written')\n"
        "except OSError: pass\n"
        "if os.geteuid() == 0 and os.fork() == 0:\n"
        "    os.setgid(65534); os.setuid(65534)\n"
        "    try: open(path)\n"
        "    except PermissionError: os._exit(0)\n"
        "    os._exit(9)\n"
        "if os.geteuid() == 0: assert os.wait()[1] == 0\n"
    )
    place.python(code)


@pytest.mark.slow
def test_a_program_has_a_key_on_a_lease_until_that_ends_its_children_too(place):
    """The page of the lease is of this process; the program and its child map it, and see its end at once."""
    page = LeasePage.create([Key.load(place.path / "owner.key")], Moment.now().after(60))
    twice = (
        "import os, sys, safetensors, subprocess\n"
        "def read():\n"
        "    with safetensors.safe_open(sys.argv[1] + '/model.safetensors', 'np') as file:\n"
        "        return int(file.get_tensor('b').sum())\n"
        "print(read(), flush=True); sys.stdin.readline()\n"
        "if len(sys.argv) == 2: subprocess.run([*sys.orig_argv, 'child'], stdin=subprocess.DEVNULL)\n"
        "read()\n"
    )
    program = (sys.executable, "-c", twice, "sealed")
    with place.begin(*program, key=("--key", page.source), stdin=subprocess.PIPE) as process:
        first = process.stdout.readline()
        page.end("the test says so")
        out, said = process.communicate("\n", timeout=120)
    assert (first.strip(), out, process.returncode) == (SUM, "", 1), said
    assert said.count("LeaseError: using key") + said.count("LeaseError: opening lease:") == 2, said


@pytest.mark.slow
def test_kv_blocks_have_a_named_key_or_a_random_one_where_nothing_else_reads_them(place):
    code = (
        "from fastrack.kv._settings import block_key\n"
        "for is_shared in (True, False):\n"
        "    try: print(block_key(None, is_shared=is_shared).id)\n"
        "    except Exception as error: print(type(error).__name__)\n"
    )
    ids = {name: Key.load(place.path / name).id for name in ("owner.key", "kv.key")}
    assert place.python(code, options=["--kv-key", "kv.key"]).split() == [ids["kv.key"]] * 2
    first, second = (place.python(code).split() for _ in range(2))
    assert first[0] == second[0] == "UnknownKeyError"
    assert first[1] != second[1]
    shared, own = place.python(code, key=[], env={"FASTRACK_KEY_FILE": "owner.key"}).split()
    assert shared == ids["owner.key"] != own


@pytest.mark.slow
def test_a_loader_in_another_language_gets_a_stub_or_the_plain_file_that_was_named(place):
    code = (
        "import sys; text = open(sys.argv[1] + '/model.safetensors', 'rb').read()\n"
        "print(len(text), text.count(b'sealed by'))"
    )
    assert place.python(code).split()[1] == "1"
    size, stubs = place.python(code, options=["--memfd", "*.safetensors"]).split()
    assert (int(size) > 64 * 64 * 4, stubs) == (True, "0")
    assert place.python(READ, options=["--memfd", "*.safetensors"]) == SUM
    said = place.python(code, options=["--memfd", "*.gguf"], status=2)
    assert said == "error: --memfd: expected sealed files of the folders, got '*.gguf'. Correct it\n"


@pytest.mark.slow
def test_the_status_of_the_program_is_the_launchers(place):
    place.run("sh", "-c", "exit 7", "sealed", status=7)
    place.run("sh", "-c", "kill -9 $$", "sealed", status=137)
    (place.path / "servr").mkdir()  # which the error does not take for the program
    said = place.run("servr", "sealed", status=6)
    assert "servr: expected a program in PATH" in said
    assert "Did you mean" not in said
    (place.path / "serve.py").write_text("")
    assert "Name its interpreter" in place.run("./serve.py", "sealed", status=1)


@pytest.mark.slow
def test_a_program_has_the_descriptors_and_the_ignored_signals_that_its_launcher_was_given(place):
    """As behind `<(...)` of a shell and behind `nohup`."""
    code = (
        f"import os, signal, sys; {READ}; print(os.read(int(sys.argv[2]), 9).decode(), "
        "[signal.getsignal(each) == signal.SIG_IGN for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)])\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    assert not os.path.realpath(f'/proc/self/fd/{name}').startswith('/memfd:'), name\n"
    )
    reading, writing = os.pipe()
    os.write(writing, b"piped")
    ignoring = ["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh"]
    words = [*ignoring, *place.words(sys.executable, "-c", code, "sealed", str(reading))]
    done = subprocess.run(
        words, cwd=place.path, env=place.env, pass_fds=[reading], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:2] == [SUM, "piped [True, True, False]"], done.stderr


WAITING = (
    "import os, signal, sys, time\n"
    "seen = []\n"
    "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):\n"
    "    signal.signal(number, lambda number, _: seen.append(number))\n"
    "print(os.getpid(), flush=True)\n"
    "while not seen: time.sleep(0.01)\n"
    "time.sleep(0.3)\n"
    "print(*(each.name for each in map(signal.Signals, seen)), flush=True)\n"
    "sys.exit(40 + len(seen))\n"
)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)),
    ],
)
@pytest.mark.slow
def test_a_signal_is_passed_on_once(place, number):
    ignored = signal.getsignal(number) == signal.SIG_IGN  # as what `nohup make test` starts has it
    if ignored:
        signal.signal(number, signal.SIG_DFL)
    process = place.begin(sys.executable, "-c", WAITING, "sealed")
    if ignored:
        signal.signal(number, signal.SIG_IGN)
    with process:
        process.stdout.readline()
        process.send_signal(number)
        assert process.stdout.read().strip() == number.name
    assert process.returncode == 41
    assert place.slots() == []


@pytest.mark.slow
def test_a_key_of_a_terminal_reaches_the_program_once(place):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(place.path)
        os.execve(sys.executable, place.words(sys.executable, "-c", WAITING, "sealed"), place.env)
    try:
        os.read(terminal, 100)
        os.write(terminal, b"\x03")
        said = b""
        while b"SIG" not in said:
            said += os.read(terminal, 100)
        assert said.count(b"SIGINT") == 1
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 41
    finally:
        os.close(terminal)


@pytest.mark.slow
def test_a_killed_launcher_ends_its_program_and_the_next_start_removes_what_it_left(place):
    code = "import sys, time; print(sys.argv[1], flush=True); time.sleep(60)"
    link = place.path / "link"
    process = place.begin(sys.executable, "-c", code, "sealed", folders=[f"sealed={link}"])
    with process:
        process.stdout.readline()
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    until = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < until
        time.sleep(0.02)
    (left,) = place.slots()
    assert {path.name for path in left.iterdir()} == {"run.json", "sealed"}
    assert place.python(READ, str(link), folders=[f"sealed={link}"]) == SUM  # in the place of the link that it left
    assert place.slots() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:seal_folder.*spm.model")
@pytest.mark.parametrize("lost", ["the launcher", "its /proc"])
def test_weights_do_not_open_without_the_vocabulary_beside_them(place, lost):
    """It is in memory of the launcher, and where it is absent libraries make up another one."""
    place.seal("talking", spoken=True)
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    code = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); launcher = os.getppid()\n"
        "print(os.path.exists(sys.argv[1] + '/spm.model'), flush=True)\n"
        f"while {lost == 'the launcher'} and os.getppid() == launcher: time.sleep(0.02)\n"
        f"try: exec({READ!r})\nexcept Exception as error: print(error)\n"
    )
    words = [*(unshare if lost != "the launcher" else []), sys.executable, "-c", code, "talking"]
    if lost != "the launcher" and subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a namespace of processes")
    with place.begin(*words, folders=["talking"]) as process:
        assert process.stdout.readline() == f"{lost == 'the launcher'}\n"
        if lost == "the launcher":
            process.kill()
        assert "spm.model: expected memory of `fastrack run`, got none" in process.stdout.read()


@pytest.mark.slow
def test_two_launchers_of_a_folder_leave_each_others_copies(place):
    code = "import sys; print(sys.argv[1], flush=True); sys.stdin.read(); " + READ
    with place.begin(sys.executable, "-c", code, "sealed", stdin=subprocess.PIPE) as first:
        path = first.stdout.readline().strip()
        with place.begin(sys.executable, "-c", code, "sealed", stdin=subprocess.PIPE) as second:
            other = second.stdout.readline().strip()
            assert other != path
            out, said = first.communicate(timeout=60)
            assert out.strip() == SUM, said
            out, said = second.communicate(timeout=60)
            assert out.strip() == SUM, said
    assert place.slots() == []


@pytest.mark.slow
def test_a_launcher_below_another_keeps_the_folders_of_both(place):
    place.seal("second", b=np.arange(20))
    both = f"{READ}; sys.argv[1] = sys.argv[2]; {READ}"
    inner = place.words(sys.executable, "-c", both, "OUTER", "second", folders=["second"])
    script = shlex.join(inner).replace("OUTER", '"$1"')
    assert place.run("sh", "-c", script, "sh", "sealed").split() == [SUM, "190"]


@pytest.mark.slow
def test_a_folder_in_another_one_and_the_current_one_are_named_too(place):
    place.seal("sealed/below", b=np.arange(20))
    folders = ["sealed", "sealed/below"]
    code = f"{READ}; sys.argv[1] = sys.argv[2]; {READ}"
    assert place.python(code, "sealed", "sealed/below", folders=folders).split() == [SUM, "190"]
    code = (
        f"import os; os.chdir('sealed'); os.execv(sys.executable, [*{place.words(sys.executable, '-c', READ, '.')!r}])"
    )
    code = "import sys; " + code.replace("'sealed', '--key', 'owner.key'", "'.', '--key', '../owner.key'")
    assert (
        subprocess.check_output([sys.executable, "-c", code], cwd=place.path, env=place.env, text=True).strip() == SUM
    )


@pytest.mark.slow
def test_a_start_that_imports_safetensors_by_itself_is_reached(place):
    (place.path / "early").mkdir()
    (place.path / "early/sitecustomize.py").write_text("import safetensors")
    path = f"{place.path / 'early'}:{place.env['PYTHONPATH']}"
    assert place.python(READ, env={"PYTHONPATH": path}) == SUM


@pytest.mark.slow
def test_a_child_with_the_hook_of_another_version_too_is_reached(place):
    shutil.copytree(launcher._HOOK, place.path / "hook")
    path = f"{place.path}/hook:$PYTHONPATH"
    words = [sys.executable, "-c", READ, "sealed"]
    assert place.run("sh", "-c", f'PYTHONPATH="{path}" exec "$@"', "sh", *words) == SUM


@pytest.mark.slow
def test_a_folder_may_be_a_url_with_a_signature_or_with_a_link(place):
    with RangeServer(place.path) as server:
        url, link = server.url("sealed"), str(place.path / "link")
        for word, argument in ((f"{url}?sign=a=b", f"{url}?sign=a=b"), (f"{url}={link}", link)):
            assert place.python(READ, argument, folders=[word]) == SUM


@pytest.mark.slow
def test_a_folder_has_any_name_of_a_file(place):
    name = os.fsdecode(b"mod\xe8le, \xc3\xa0: b=1\n")
    place.seal(name)
    assert place.python(READ, name, folders=[name]) == SUM
    assert place.python(READ, name, folders=[name], env={"LC_ALL": "C", "PYTHONUTF8": "0"}) == SUM


@pytest.mark.slow
def test_a_folder_of_temporary_files_may_have_colons(place):
    for name in ("a:b", "c: d"):
        (place.path / name).mkdir()
        assert place.python(READ, env={"TMPDIR": str(place.path / name)}) == SUM


@pytest.mark.slow
def test_a_child_of_another_user_is_told_of_no_copies_and_so_opens_its_own_files(place):
    code = (
        "import os; from fastrack._models import launched\n"
        "root = os.environ['FASTRACK_RUN']\n"
        "os.setuid(65534) if os.geteuid() == 0 else os.chmod(root, 0)\n"
        "print(launched._describe())\n"
        "if os.geteuid() != 65534: os.chmod(root, 0o700)\n"
    )
    assert place.python(code) == "{}"


@pytest.mark.slow
def test_a_folder_of_another_user_in_the_place_of_the_copies_is_refused(place):
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a folder of another user")
    base = place.path / "tmp" / f"fastrack-run-{os.geteuid()}"
    base.mkdir()
    os.chown(base, 65534, 65534)
    said = place.python(READ, status=5)
    assert "may be replaced by others" in said
    assert said.endswith("note: TMPDIR names the folder for private copies: set it to one of your own\n")


@pytest.mark.slow
def test_no_core_has_keys_or_weights(place):
    assert place.python("import resource; print(resource.getrlimit(resource.RLIMIT_CORE)[0])") in {"0", "1"}


@pytest.mark.slow
def test_as_the_first_process_of_a_container_orphans_are_waited_for(place):
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a namespace of processes")
    code = (
        "import os, time; assert os.getppid() == 1\n"
        "if os.fork() == 0:\n"
        "    if os.fork(): os._exit(0)\n"
        "    time.sleep(0.2); os._exit(5)\n"
        "os.wait(); time.sleep(0.5)\n"
        "assert [name for name in os.listdir('/proc') if name.isdecimal()] == ['1', str(os.getpid())]\n" + READ
    )
    words = [*unshare, *place.words(sys.executable, "-c", code, "sealed")]
    done = subprocess.run(words, cwd=place.path, env=place.env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, SUM), done.stderr


@pytest.mark.slow
def test_no_process_writes_a_weight_and_a_program_that_saves_shows_that_the_search_finds_it(place, tmp_path):
    needles = [WEIGHTS["a"].reshape(-1).view(np.uint8)[at : at + 16].tobytes() for at in range(64, 16_000, 2_000)]
    save = f"{READ}; open('saved', 'wb').write(load_file(sys.argv[1] + '/model.safetensors')['a'])"
    sealed = str(place.path / "sealed")
    for code, expected in ((READ, 0), (save, len(needles))):
        words = place.words(
            sys.executable, "-c", code, sealed, folders=[sealed], key=["--key", f"{place.path}/owner.key"]
        )
        status, said, writes = trace(words, env=place.env, folder=tmp_path / f"traced-{expected}")
        assert status == 0, said
        assert len(writes.found(needles)) == expected
