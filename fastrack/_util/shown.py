"""Arguments in messages: without keys, passwords of URLs, and values of tensors."""

from __future__ import annotations

import os

from fastrack._util.key_text import has_key
from fastrack._util.locations import without_password

HIDDEN = "what looks like a key, which is not repeated here"


def shown(value: object, limit: int = 80, *, may_be_id: bool = False) -> str:
    """Return the text of an argument for a message: an integer, a text or a path, or the type of any other object.

    Keys, and user, password and query of a URL, are hidden. With `may_be_id`, 32 lower-case digits are shown.
    """
    if isinstance(value, (str, os.PathLike)):
        text = os.fsdecode(value)
        return HIDDEN if has_key(text, may_be_id=may_be_id) else f"{without_password(text)!r:.{limit}}"
    if value is None or type(value) in {bool, int} or (type(value) in {list, tuple} and not value):
        return f"{value!r:.{limit}}"
    return f"an object of type {type(value).__qualname__}"
