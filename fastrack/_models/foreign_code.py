"""References of configurations to code outside of their folder, which nothing authenticates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fastrack._util.locations import Location
from fastrack.errors import FormatError

# Members that name classes: of transformers and diffusers, of its pipelines, and of sentence-transformers.
_MEMBERS = {"auto_map", "custom_pipelines", "type", "types", "_class_name", "__class__"}
# ``owner/repository--module.Class`` is fetched by transformers; paths that are absolute or go up leave the folder.
_FOREIGN = re.compile(r".*--.*\..*|[/\\].+|[A-Za-z]:[/\\].*|(.*[/\\])?\.\.[/\\].*", re.DOTALL)
_BEFORE_NAME = re.compile(r".*(--|[/\\])", re.DOTALL)
# A folder that no mount has. With its name, a reference is none of a module that Python finds elsewhere, either.
_NOWHERE = "code-of-another-repository/"


def refuse_foreign_code(content: bytes, place: Location) -> bytes:
    """Return a configuration unchanged, or refuse it if it refers to code outside of its folder."""
    for _, _, reference in _foreign_in(_parse(content, place)):
        raise ValueError(
            f"{place}: trust_remote_code=: expected code in this folder, got a reference to another "
            f"repository or folder, {reference!r:.200}. Put the code into the folder, and seal it again"
        )
    return content


def without_foreign_code(content: bytes, place: Location) -> bytes:
    """Return a configuration whose references to other code lead nowhere.

    Without ``trust_remote_code=True`` a library does not follow them, and with it finds no such file.
    """
    document = _parse(content, place)
    found = list(_foreign_in(document))
    for parent, key, reference in found:
        parent[key] = _BEFORE_NAME.sub(_NOWHERE, reference)
    return json.dumps(document, indent=2).encode() if found else content


def _parse(content: bytes, place: Location) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None  # no configuration, which could refer to code
    except RecursionError:
        raise FormatError(
            f"{place}: expected JSON of fewer levels, got more than can be looked through for references to code. "
            "Leave it out of the folder, or seal it under another suffix"
        ) from None


def _foreign_in(document: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield each reference to other code in a document, with the container that has it and its key there."""
    stack: list[tuple[Any, bool]] = [([document], False)]
    while stack:
        parent, is_named = stack.pop()
        for key, value in list(parent.items() if isinstance(parent, dict) else enumerate(parent)):
            is_reference = is_named or key in _MEMBERS
            if isinstance(value, (dict, list)):
                stack.append((value, is_reference))
            elif is_reference and isinstance(value, str) and _FOREIGN.fullmatch(value):
                yield parent, key, value
