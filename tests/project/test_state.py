"""All state of a process beyond its calls is in one list, with what a forked child does with it."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/dev/state.md"
PACKAGES = ROOT / "fastrack", ROOT / "bench/fastrack_bench"
# Calls that make what changes: a container that is filled later, a lock, a variable of a context.
MAKERS = {"ContextVar", "Lock", "OrderedDict", "RLock", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
MAKERS |= {"defaultdict", "deque", "local", "set"}
CACHES = {"cache", "lru_cache"}
CONSTANTS = {"Typer", "_Codec"}  # classes of objects that do not change once they are imported


def name_of(node):
    """Return the last name of an expression such as `threading.Lock()`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_filled_later(value):
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    return isinstance(value, ast.Call) and name_of(value) in MAKERS


def is_object(target, value):
    """Return whether a name, which is none of a constant, is given an object of a class."""
    made = name_of(value) if isinstance(value, ast.Call) and target.id.islower() else ""
    return made.lstrip("_")[:1].isupper() and made not in CONSTANTS


def state_of(text):
    """Return what a module holds: classes that start over after a fork, actions after one, variables and caches."""
    tree = ast.parse(text)
    resets, variables, caches = set(), set(), set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target for target in targets if isinstance(target, ast.Name)]
            variables |= {each.id for each in names if is_filled_later(node.value) or is_object(each, node.value)}
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                if any(isinstance(each, ast.FunctionDef) and each.name == "reset_after_fork" for each in node.body):
                    resets.add(name)
            case ast.FunctionDef(name=name):
                if CACHES & set(map(name_of, node.decorator_list)):
                    caches.add(name)
            case ast.Global(names=names):
                variables |= set(names)
            case ast.Call(func=ast.Name(id="after_fork"), args=[action]):
                resets.add(ast.unparse(action))
    return {"starts over": resets, "is kept": variables, "is cached": caches}


def place_of(path):
    """Return how a module is named: below `fastrack`, or by its own package."""
    found = path.relative_to(ROOT).with_suffix("").as_posix()
    return found.removeprefix("fastrack/").removeprefix("bench/")


def found_in(*packages):
    return {
        (kind, f"{place_of(path)}:{name}")
        for package in packages
        for path in package.rglob("*.py")
        for kind, names in state_of(path.read_text(encoding="utf-8")).items()
        for name in names
    }


def listed():
    """Return the rows of the page's tables: the heading of the section, and the place."""
    rows, kind = set(), ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kind = line.removeprefix("## What ").strip()
        elif match := re.match(r"\| `([^`]+:[^`]+)` \|", line):
            rows.add((kind, match[1]))
    return rows


def test_all_that_a_process_holds_is_listed():
    found, known = found_in(*PACKAGES), listed()
    assert found - known == set(), f"a line of {PAGE.name} is missing"
    assert known - found == set(), f"{PAGE.name} lists what there is no more"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("_lock = threading.Lock()", "is kept"),
        ("_pool = _Pool(4)", "is kept"),
        ("_found: dict[str, int] = {}", "is kept"),
        ("_one = None\ndef put():\n    global _one\n    _one = 1", "is kept"),
        ("@cache\ndef find(): ...", "is cached"),
        ("@functools.lru_cache(maxsize=3)\ndef find(): ...", "is cached"),
        ("class Pool:\n    def reset_after_fork(self): ...", "starts over"),
        ("after_fork(_pool.clear)", "starts over"),
    ],
)
def test_what_would_be_missing_is_found(text, kind):
    assert [name for name, found in state_of(text).items() if found] == [kind]


# Makers of locks, and of what has one: a thread that a forked child lacks may hold it.
LOCKS = {
    "threading": {"Barrier", "BoundedSemaphore", "Condition", "Event", "Lock", "RLock", "Semaphore"},
    "queue": {"LifoQueue", "PriorityQueue", "Queue", "SimpleQueue"},
    "concurrent.futures": {"ProcessPoolExecutor", "ThreadPoolExecutor"},
    "functools": {"cached_property"},  # on Python 3.11 it has one lock for all objects of the class
}
NO_GPU = "a forked child uses no GPU: its calls are refused, or return, before they come to a lock"
ONE_CALL = "of one call, in which nothing forks"
MEASURED = "of a measurement, in which nothing forks"
NOT_RENEWED = {
    "_bench/paths:_Path._device": MEASURED,
    "_devices/cuda/buffers:CudaStagingBuffer.issued": NO_GPU,
    "_devices/cuda/buffers:MessageStatePool._lock": NO_GPU,
    "_devices/cuda/link:Link._lock": NO_GPU,
    "_devices/cuda/operation:CudaOperation._reading": NO_GPU,
    "_devices/cuda/recorder:CommandList.issued": NO_GPU,
    "_devices/cuda/streams:Pipeline._lock": NO_GPU,
    "_remote/remote_file:_Copy._lock": "the file that has it makes another copy in a child",
    "_training/prefetch:PrefetchThread._permits": "in a child the iteration has nothing but an error",
    "_training/prefetch:PrefetchThread._ready": "a child makes another one, for the error",
    "_training/shards:threads": ONE_CALL,
    "_transfer/prefetch:PrefetchLoader._pool": "a child has none",
    "distributed/_group:SecureGroup._thread": "a child may make no call of its parent's group",
    "fastrack_bench/prediction/curves:Curve._ratios": MEASURED,
    "fastrack_bench/ring:NaiveRing._thread": MEASURED,
}


def _module_of(node, imported):
    """Return the module and name of a maker, such as `threading.Lock`, or nothing."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value), node.attr
    return imported.get(node.id, (None, None)) if isinstance(node, ast.Name) else (None, None)


def _target_of(node, parents):
    """Return the name that gets what is made at a node: of a variable, an attribute with its class, or a function."""
    while not isinstance(node, ast.stmt):
        node = parents[node]
    if isinstance(node, ast.With):
        name = ast.unparse(node.items[0].optional_vars)
    elif isinstance(node, ast.FunctionDef):
        name = f"self.{node.name}"  # which is decorated
    else:
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node))
    while name.startswith("self.") and not isinstance(node, ast.ClassDef):
        node = parents[node]
    return name.replace("self", node.name, 1) if name.startswith("self.") else name


def locks_of(text):
    """Return the names of what has a lock in a module, and keeps it in a forked child."""
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    origins = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {each.asname or each.name: (node.module, each.name) for node in origins for each in node.names}
    actions = {"reset_after_fork"} | {
        ast.unparse(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and name_of(node) == "after_fork"
    }
    made, renewed = set(), set()
    for node in ast.walk(tree):
        module, name = _module_of(node, imported)
        if name not in LOCKS.get(module, ()):
            continue
        around, at = [node], node
        while at in parents:
            at = parents[at]
            around.append(at)
        if any(isinstance(each, ast.Call) and name_of(each) == "per_process" for each in around):
            continue
        # What annotations and the parameters of classes name is not made.
        if any(
            getattr(upper, field, None) is inner
            for upper, inner in zip(around[1:], around, strict=False)
            for field in ("annotation", "returns")
        ):
            continue
        is_reset = any(isinstance(each, ast.FunctionDef) and each.name in actions for each in around)
        (renewed if is_reset else made).add(_target_of(node, parents))
    return made - renewed


def test_each_lock_is_made_anew_in_a_forked_child():
    names = re.compile("|".join(name for names in LOCKS.values() for name in names))
    texts = {path: path.read_text(encoding="utf-8") for package in PACKAGES for path in package.rglob("*.py")}
    found = {
        f"{place_of(path)}:{name}" for path, text in texts.items() if names.search(text) for name in locks_of(text)
    }
    assert found - NOT_RENEWED.keys() == set(), "use per_process, or renew it in reset_after_fork"
    assert NOT_RENEWED.keys() - found == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import threading\n_lock = threading.Lock()", {"_lock"}),
        ("import threading\n_lock: threading.Lock = threading.Lock()", {"_lock"}),
        ("from threading import RLock as L\nclass A:\n    def __init__(self):\n        self.x = L()", {"A.x"}),
        ("from queue import Queue\ndef use():\n    some = Queue()", {"some"}),
        ("import threading\n@dataclass\nclass A:\n    x: Any = field(default_factory=threading.Event)", {"x"}),
        ("from functools import cached_property\nclass A:\n    @cached_property\n    def x(self): ...", {"A.x"}),
        ("import threading\nclass A:\n    def reset_after_fork(self):\n        self.x = threading.Lock()", set()),
        ("import threading\nx = threading.Lock()\ndef f():\n    x = threading.Lock()\nafter_fork(f)", set()),
        (
            "import threading\nclass A:\n    def f(self):\n        self.x = per_process(self, 'x', threading.Lock)",
            set(),
        ),
        ("from queue import Queue\ndef use(some: Queue) -> Queue: ...", set()),
    ],
)
def test_a_lock_that_would_be_kept_is_found(text, found):
    assert locks_of(text) == found
