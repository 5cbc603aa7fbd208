"""Options of several commands."""

from enum import StrEnum
from typing import Annotated

import typer

KEY_HELP = (
    "A key file or a folder of them; - for standard input; fd:N; SCHEME:REST for a key provider. If absent, as "
    "FASTRACK_KEY_FILE says."
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, also on failure.")]
Force = Annotated[bool, typer.Option("--force", help="Replace TARGET if it exists.")]
Expect = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Fail unless this tensor is in the file, and sealed; may be repeated."),
]
FileId = Annotated[
    str | None, typer.Option("--file-id", metavar="ID", help="Fail unless the file has this id, which `inspect` shows.")
]
KeyFile = Annotated[str | None, typer.Option("--key", metavar="KEY", help=KEY_HELP)]
KeyFiles = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="KEY", help=f"{KEY_HELP} May be repeated."),
]


class Bits(StrEnum):
    """Sizes of an AES key."""

    AES_256 = "256"
    AES_128 = "128"


class Algorithm(StrEnum):
    """Algorithms of key pairs."""

    MLKEM768_X25519 = "MLKEM768_X25519"
    P_384 = "P-384"
    ED25519 = "Ed25519"
    ML_DSA_65 = "ML-DSA-65"
