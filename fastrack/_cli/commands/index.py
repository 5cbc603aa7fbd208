"""``fastrack index``: list the shards of a dataset."""

from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.console import clean, pluralize, tell
from fastrack._cli.errors import refuse_values
from fastrack._cli.files import as_location, open_ring
from fastrack._cli.options import Json, KeyFile, Silent
from fastrack._samples.shard_index import INDEX, ShardIndex
from fastrack._training.index_dataset import index_dataset
from fastrack._util.locations import join


def index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a dataset, or its URL.")],
    *,
    key: KeyFile = None,
    quiet: Silent = False,
    as_json: Json = False,
) -> None:
    """List the shards of a dataset in a sealed file, so that opening it reads no shard; again after more came."""
    ring, location = open_ring(key), as_location(folder)
    with refuse_values("FOLDER"):
        file_id = index_dataset(location, ring.first)
    written = ShardIndex.read(join(location, INDEX), ring)
    lines = [f"{clean(str(written.location))}: {pluralize(len(written.shards), 'shard')}", f"file id: {file_id}"]
    tell(lines, as_json=as_json, quiet=quiet, path=str(written.location), shards=len(written.shards), file_id=file_id)
