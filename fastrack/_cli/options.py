"""Options of several commands."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, also on failure.")]
Force = Annotated[bool, typer.Option("--force", help="Replace TARGET if it exists.")]
Expect = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Fail unless this tensor is in the file, and sealed; may be repeated."),
]
FileId = Annotated[
    str | None, typer.Option("--file-id", metavar="ID", help="Fail unless the file has this id, which `verify` prints.")
]
KeyFile = Annotated[
    Path | None, typer.Option("--key", metavar="PATH", help="The key file. If absent, FASTRACK_KEY_FILE names it.")
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option("--key", metavar="PATH", help="A key file; may be repeated. If absent, FASTRACK_KEY_FILE names it."),
]
Bits = Literal["256", "128"]
