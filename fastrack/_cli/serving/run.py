"""``fastrack run``: a program that opens sealed folders by its own code, unchanged."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.errors import file_path, reading_keys, refuse_options, refuse_values
from fastrack._cli.files import key_sources
from fastrack._cli.options import AnchorFile, KeyFiles
from fastrack._cli.program import BEHIND
from fastrack._keys.keyring import KEY_FILE_VARIABLE
from fastrack._models.launcher import Launcher
from fastrack._sets.load_file import resolve_anchor


def run(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FOLDER... -- COMMAND",
            help="Sealed folders; FOLDER=PATH makes a link at PATH while COMMAND runs. Then the program and its "
            "arguments, in which a private copy takes the place of each FOLDER.",
        ),
    ],
    *,
    key: KeyFiles = None,
    kv_key: Annotated[
        str | None,
        typer.Option("--kv-key", metavar="KEY", help="The key of KV blocks. If absent, a random one of this start."),
    ] = None,
    anchor: AnchorFile = None,
    code: Annotated[bool, typer.Option("--code", help="Copy authenticated Python files too, for remote code.")] = False,
    memfd: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Decrypt this file, or those of a glob, into host memory, for loaders in C++; may be repeated.",
        ),
    ] = None,
) -> None:
    """Run a program that opens sealed folders by its own code, unchanged, with its children.

    Each process opens the weights as it reads them with safetensors. Signals are passed on; the status is the
    program's.
    """
    command = ctx.meta.get(BEHIND, [])
    folders: dict[str, list[Path]] = {}  # with their links
    for folder, links in map(_split, words[: len(words) - len(command)]):
        folders.setdefault(folder, []).extend(links)
    got = "no folder" if command else "no command"
    reason = f"expected FOLDER... -- COMMAND, got {got}: `fastrack run sealed -- python serve.py sealed`"
    refuse_options({"FOLDER": not folders or not command}, reason)
    if sys.platform != "linux":
        raise OSError(f"`fastrack run` needs Linux, got {sys.platform}. Use fastrack.mount_folder in the program")
    named, anchored, unmatched = key_sources(key), resolve_anchor(anchor), set(memfd or ())
    with reading_keys():
        opened = Launcher(named or [os.environ[KEY_FILE_VARIABLE]], kv_key)
    with opened as launcher:
        for folder, links in folders.items():
            with refuse_values("--code"):
                unmatched -= launcher.mount(folder, links, anchor=anchored, code=code, memfd=memfd or ())
        missing = ", ".join(map(repr, sorted(unmatched)))
        refuse_options({"--memfd": missing}, f"expected sealed files of the folders, got {missing:.200}. Correct it")
        with refuse_values("FOLDER"):
            shown = launcher.name_in(command)
        own = {} if named else {KEY_FILE_VARIABLE: launcher.sources[0]}  # which the program may use by itself
        status = launcher.run(shown, {**os.environ, **own})
    raise typer.Exit(status)


def _split(word: str) -> tuple[str, list[Path]]:
    """Return a folder, and the path of a link to its private copy, if the word has one."""
    folder, equal, link = word.rpartition("=")
    is_folder = not equal or "?" in folder.partition("://")[2] or Path(word).is_dir()  # or a URL with a signature
    return (word, []) if is_folder else (folder, [file_path(link.rstrip("/"))])
