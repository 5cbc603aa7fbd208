"""Options of several commands."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

KEY_HELP = (
    "A key file or a folder of them; - for standard input; fd:N; SCHEME:REST for a key provider. If absent, as "
    "FASTRACK_KEY_FILE says."
)
RULE = (
    "A TARGET that ends in .safetensors, or is -, takes one SOURCE; any other is a folder, in which each file gets "
    "its own name with .safetensors behind it. A SOURCE that is a folder is sealed as one, like a model, into a new "
    "folder; with -r its files are sealed one by one."
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, also on failure.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, also on failure; of several files, one on each line.")
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace a target that exists.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check what is checked before the first write, say what would be, and end.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="TARGET", help="The target, in place of the last path; - is standard output."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors, and what is left unencrypted.")]
SkipExisting = Annotated[
    bool,
    typer.Option(
        "--skip-existing", help="Leave targets that are sealed under the key, to go on after an interruption."
    ),
]
SkipUnchecked = Annotated[
    bool, typer.Option("--skip-existing", help="Leave targets that exist, unchecked, to go on after an interruption.")
]
Silent = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="Take the files in folders, and in those below.")]
Expect = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Fail unless this tensor is in the file, and sealed; may be repeated."),
]
FileId = Annotated[
    str | None, typer.Option("--file-id", metavar="ID", help="Fail unless the file has this id, which `verify` prints.")
]
AnchorFile = Annotated[
    Path | None,
    typer.Option(
        "--anchor", metavar="ANCHOR", help="An anchor: nothing older than what it remembers, and nothing else."
    ),
]
KeyFile = Annotated[str | None, typer.Option("--key", "-k", metavar="KEY", help=KEY_HELP)]
KeyFiles = Annotated[list[str] | None, typer.Option("--key", "-k", metavar="KEY", help=f"{KEY_HELP} May be repeated.")]
Bits = Literal["256", "128"]
Algorithm = Literal["MLKEM768_X25519", "P-384", "Ed25519", "ML-DSA-65"]


def split_names(texts: Sequence[str]) -> list[str]:
    """Return the names in the texts of `--columns`, as in a line of CSV: in quotes if they have commas or quotes."""
    try:
        return [name for text in texts for name in next(csv.reader([text], strict=True), None) or [""]]
    except csv.Error:  # a quote without its end, or the end of a line outside quotes
        advice = "Put a name with a comma, a quote or the end of a line into quotes, and double its quotes"
        raise typer.BadParameter(f"expected names as in a line of CSV. {advice}", param_hint="--columns") from None
