"""All state of a process beyond its calls is in one list, with what a forked child does with it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/dev/state.md"
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


def found_in(package):
    return {
        (kind, f"{path.relative_to(package).with_suffix('').as_posix()}:{name}")
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


@pytest.mark.slow
def test_all_that_a_process_holds_is_listed():
    found, known = found_in(ROOT / "fastrack"), listed()
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
