"""Check the English of docstrings and comments."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELATIVE_CLAUSE = re.compile(r"\W*(how|what|who|where|whether|which)\b", re.IGNORECASE)
PERSON = re.compile(r"\b(whoever|nobody|somebody)\b", re.IGNORECASE)
# Words that docs/dev/words.md replaces, where the text around them leaves no other meaning. The page has the others.
OLD_WORD = re.compile(
    r"\bdata sets?\b|\bin plain(?! words\b| torch\b)(?=[\s.,;:)])|\bmend(s|ed|ing)?\b|\beditions? of\b|"
    r"\b(this|these|those)( \w+)? alone\b|\bthat \w+(?<!s) alone\b|\balone may\b|"
    r"\b(or|was|were|missing,) exchanged\b|\btakes? (no key|\w+, which is not installed)\b",
    re.IGNORECASE,
)
PROMISED = ('"data set"',)  # a value in JSON
# Words that D401 lets pass and that begin no imperative sentence.
NO_VERB = re.compile(
    r"\W*(a|all|an|another|any|as|after|before|both|by|each|every|for|from|how|if|in|it|its|many|no|none|nothing|of|on|one|"
    r"same|several|some|such|that|the|their|these|they|this|those|to|what|when|where|whether|which|who|whose|why|with)\b",
    re.IGNORECASE,
)
PACKAGES = ("fastrack", "bench/fastrack_bench")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*folders):
    """Return the Python files below these folders of the project, the packages by default."""
    return sorted(path for folder in folders or PACKAGES for path in (ROOT / folder).rglob("*.py"))


def having(pattern, *folders):
    """Return the Python files of these folders whose text has a match: to parse the others would take long."""
    pattern = re.compile(pattern, re.IGNORECASE)
    return [path for path in sources(*folders) if pattern.search(path.read_text(encoding="utf-8"))]


def docstrings(path):
    """Yield the node, line and text of every docstring of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)):
            text = ast.get_docstring(node)
            if text:
                yield node, node.body[0].lineno, text


def texts(path):
    """Yield the line and text of every comment and string of a file."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(io.BytesIO(file.read()).readline):
            if token.type in {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}:
                yield token.start[0], token.string


def offences():
    """List relative clauses in place of sentences, and the package's mentions of persons, as ``path:line: text``."""
    clauses = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in having(f"[\"']{RELATIVE_CLAUSE.pattern}", "fastrack", "bench", "examples", "tests")
        for _, line, text in docstrings(path)
        if RELATIVE_CLAUSE.match(text)
    ]
    persons = [
        f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, match.start())}: {match.group()}"
        for path in having(PERSON.pattern)
        for line, text in texts(path)
        for match in PERSON.finditer(text)
    ]
    return clauses + persons


def old_words():
    """List the words of comments and strings that docs/dev/words.md replaces, as ``path:line: word``."""
    return [
        f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, match.start())}: {match.group()}"
        for path in having(OLD_WORD.pattern)
        for line, text in texts(path)
        if text not in PROMISED
        for match in OLD_WORD.finditer(text)
    ]


def is_function(node):
    """Return whether a node is a function and no property, whose docstring is a noun phrase."""
    return isinstance(node, FUNCTIONS) and not any("property" in ast.unparse(mark) for mark in node.decorator_list)


def without_verb():
    """List the function docstrings that do not begin with a verb in the imperative."""
    options = ["--isolated", "--no-cache", "--select", "D401", "--output-format", "json"]
    options += ["--config", 'lint.pydocstyle.convention="numpy"', *(str(ROOT / folder) for folder in PACKAGES)]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *options], capture_output=True, text=True, check=False
    )
    if done.returncode not in {0, 1}:
        raise RuntimeError(done.stderr)
    refused = {(found["filename"], found["location"]["row"]) for found in json.loads(done.stdout)}
    return [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sources()
        for node, line, text in docstrings(path)
        if is_function(node) and ((str(path), line) in refused or NO_VERB.match(text))
    ]
