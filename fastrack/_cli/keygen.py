"""``fastrack keygen``: make a key file."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.console import clean, print_json, stdout
from fastrack._cli.files import check_directory
from fastrack._cli.options import Bits, Json


def keygen(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The key file to make. It must not exist.")],
    *,
    bits: Annotated[Bits, typer.Option(help="Size of the AES key.")] = "256",
    as_json: Json = False,
) -> None:
    """Make a key, in a file that only you may read."""
    from fastrack._crypto.keys import Key

    check_directory(path)
    key = Key.generate(int(bits))
    key.save(path)
    size, key_id = key.bits, key.id
    key.wipe()
    if as_json:
        print_json(path=str(path), id=key_id, bits=size)
        return
    quoted = clean(shlex.quote(str(path)))
    console = stdout()
    console.print(f"{clean(str(path))}: a new {size}-bit key that only you may read")
    console.print(f"id: {key_id}")
    console.print("Keep a copy in a safe place: without it, what it seals cannot be opened.")
    console.print(f"Next: fastrack seal data.safetensors sealed.safetensors --key {quoted}")
