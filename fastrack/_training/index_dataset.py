"""`index_dataset`: one sealed file that lists the shards of a dataset, so that opening it reads no shard."""

from __future__ import annotations

import errno
from contextlib import suppress

from fastrack._files.reader import SealedFile
from fastrack._keys.keyring import KeyLike, KeyRing, sealing_key
from fastrack._samples.shard_index import INDEX, IndexedShard, ShardIndex
from fastrack._sealed.message_headers import authenticate_headers
from fastrack._sets.manifest import is_name
from fastrack._training.columns import find_shards, require_places
from fastrack._training.shards import PathLike
from fastrack._util.locations import Location, Url, join, locate
from fastrack._util.public import public
from fastrack._util.shown import shown
from fastrack.errors import FormatError


@public
def index_dataset(folder: PathLike, key: KeyLike | None = None) -> str:
    """Write the index of a dataset: a sealed file ``fastrack.index`` beside its shards.

    It lists the name, size, file id and number of rows of each shard. `SealedDataset` then opens a dataset of any
    number of shards by reading this file, and each shard when its first sample is used. A shard is compared with the
    index as it is opened, so that one that is missing, swapped, older or of another dataset is refused.

    Write it again after shards were added: it takes the place of the earlier one in one step. Storage can bring back an
    older index with its shards, which are authentic too. Its file id, or an `Anchor` of a folder on this machine, says
    which one is meant.

    Parameters
    ----------
    folder : path or URL
        The folder of the shards. Their headers are read and authenticated, and their places, if a `DatasetWriter`
        wrote them.
    key : KeyLike, optional
        The owner's key, as for `seal`: of the shards, and of the index.

    Returns
    -------
    str
        The file id of the index, which ``file_ids=`` of `SealedDataset` can ask for.

    Raises
    ------
    AuthenticationError, UnknownKeyError
        If a shard was altered, or is under another key.
    FormatError
        If a file is no shard, or has tensors that were sealed for another file.
    ValueError
        If the shards differ in their columns, or tensors in their number of dimensions, or a name of a file has
        backslashes, control characters, or other bytes than UTF-8.
    OSError
        If the folder has no shards, has another file in the place of the index, or cannot be read or written.

    Examples
    --------
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> with fastrack.DatasetWriter("cities", key) as writer:
    ...     writer.write_batch({"name": ["Oslo", "Lima"], "label": [1, 4]})
    >>> file_id = fastrack.index_dataset("cities", key)
    >>> fastrack.SealedDataset("cities/fastrack.index", keys=key, file_ids=[file_id])
    <SealedDataset of 2 samples: label, name, name.lengths>
    """
    owner = sealing_key(key)
    ring = KeyRing(owner)
    location = locate(folder)
    if isinstance(location, Url):
        location = Url(f"{location.full.rstrip('/')}/")
    source = find_shards(location, use_index=False)
    if not source.is_folder:
        raise NotADirectoryError(errno.ENOTDIR, "expected the folder of a dataset, got none", str(location))
    for path in source.paths:
        _require_name(locate(path).name, location)
    target = join(location, INDEX)
    if INDEX in source.sizes:
        _require_index(target)
    shards = source.open(None)
    require_places(shards, ring)
    listed = []
    for number, contexts in enumerate(shards.contexts):
        path, opened = shards.paths[number], [shards.tensor(number, column) for column in range(len(shards.names))]
        authenticate_headers(opened, ring)
        for context, tensor in zip(contexts, opened, strict=True):
            if tensor.binding is not None or context.scale is not None or not context.shape:
                raise FormatError(
                    f"{path}: {context.name!r:.200}: expected a tensor with rows that was sealed for this file, got "
                    "another. Write the shard again"
                )
        rows = tuple(context.shape[0] for context in contexts)
        listed.append(IndexedShard(path.name, source.sizes[path.name], contexts[0].file, rows))
    tensors = tuple((context.name, context.dtype, context.shape[1:]) for context in shards.contexts[0])
    return ShardIndex(target, owner.id, tensors, tuple(listed)).write(owner)


def _require_name(name: str, folder: Location) -> None:
    """Refuse a name that readers of the index would refuse, before it is written."""
    if not is_name(name):
        raise ValueError(
            f"{folder}: expected names of UTF-8 without backslashes and control characters, got {shown(name)}. "
            "Rename it"
        )


def _require_index(path: Location) -> None:
    """Refuse to replace a file that is no index."""
    with suppress(FormatError), SealedFile(path) as file:
        if file.kind == "index":
            return
    raise FileExistsError(errno.EEXIST, "expected the earlier index of a dataset, got another file. Move it", str(path))
