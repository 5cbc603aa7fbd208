"""Reasons to refuse a request or a model, and what clients and the log are told of them."""

import traceback
from collections.abc import Iterable
from pathlib import Path

import fastrack

REASONS = {
    "altered": 400,  # a part does not authenticate, or is sealed to another key
    "broken": 400,  # the client broke off
    "crowded": 503,  # more requests in the window than are remembered
    "edition": 412,  # the client wants another edition of the model
    "large": 413,
    "machine": 421,  # for another machine, or for this one before it was started again
    "malformed": 400,
    "replayed": 409,
    "slow": 408,
    "stale": 403,  # sealed too long ago, or in the future
    "text": 422,  # the model has no tokenizer
    "tokens": 422,  # not what the model takes
    "unready": 503,  # there is no model yet; the others say why
    "architecture": 503,
    "damaged": 503,
    "incomplete": 503,
    "key": 503,
}
"""Reasons to refuse a request, with the status of the answer. The last four are also reasons to refuse a model."""

_ADVICE = {
    "architecture": "the server has no model, as it cannot run the one in its folder: see its log",
    "damaged": "the server has no model, as its folder is missing, damaged or older: see its log",
    "edition": "the server has another edition of the model: ask for that one, or for any",
    "incomplete": "the server has no model, as parts of it are missing: see its log",
    "key": "the server has no model, as its key is missing or another: see its log",
    "text": "the model has no tokenizer: ask with numbers of tokens",
    "tokens": "the model does not take these tokens, or as many: ask with others",
    "unready": "the server has no model yet: ask later, and see its log",
}
_TOLD = 1024  # characters of an error


class RefusedError(Exception):
    """A request is refused, for a reason of `REASONS`."""

    def __init__(self, reason: str) -> None:
        advice = _ADVICE.get(reason, "ask again")
        super().__init__(f"asking failed: expected an answer, got a refusal ({reason}): {advice}")
        self.reason = reason


class ModelError(Exception):
    """A model is refused, for a reason of `REASONS`. Its text is for the log, and has no values."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def refuse_missing(folder: fastrack.SealedFolder, names: Iterable[str]) -> None:
    """Refuse a model of which weights are missing."""
    if found := sorted(names):
        text = f"{folder.path}: expected all weights of its config.json, got none for {len(found)}, such as {found[0]}"
        raise ModelError("incomplete", text)


def told(error: Exception) -> str:
    """Return what a log may have of an error, as one line: its text may have values, unless this project made it."""
    if isinstance(error, (ModelError, RefusedError, fastrack.FastrackError, OSError)):
        kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
        return " ".join(f"{kind}{error}".split())[:_TOLD]
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frame.name} ({Path(frame.filename).name}, line {frame.lineno})"
