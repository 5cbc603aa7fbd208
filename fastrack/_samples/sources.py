"""`import_samples`: samples of image folders, text, JSON lines, tar archives and tables, sealed into shards."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from fastrack._keys.keyring import KeyLike
from fastrack._samples.dataset_writer import DatasetWriter
from fastrack._samples.readers import open_source
from fastrack._util.locations import locate_local
from fastrack._util.public import public
from fastrack.errors import FormatError


@public
def import_samples(
    source: Any,
    folder: str | os.PathLike[str],
    key: KeyLike | None = None,
    *,
    shard_size: int = 256 << 20,
    resume: bool = False,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Seal samples that you have into a folder of shards, which `SealedDataset` opens.

    The samples pass through memory, at most a shard of them, and no plaintext is written.

    Parameters
    ----------
    source : path, sequence of paths, or object
        - A folder of images, or of folders of images by class: the columns "image" (the bytes of the file), "label"
          (the number of the class, in alphabetical order) and "path", in the order of torchvision's ``ImageFolder``.
        - ``.txt``: "text", a record for each line, without its end.
        - ``.jsonl``: a column for each member of the first object. Text, numbers and lists of numbers are stored as
          such, and any other value as JSON.
        - ``.tar``, as of WebDataset: a column for each ending of the files with one name, and "__key__". "cls" is a
          number, all others are bytes.
        - ``.parquet``, ``.arrow`` and ``.feather``, with PyArrow: a column for each of theirs. Numbers are copied,
          dates become the integers that Arrow stores, text, bytes and lists of numbers are records.
        - A folder of files of one of these kinds, in the order of their names, without folders among them, or several
          such files.
        - A ``pyarrow.Table`` or ``RecordBatchReader``, a ``pandas.DataFrame`` or a ``datasets.Dataset``, as a Parquet
          file, or an iterable of samples, as `DatasetWriter.write` takes them.
    folder, key, shard_size
        As for `DatasetWriter`.
    resume : bool
        Continue in a folder that has shards: read the source from its start again, compare its first samples with the
        stored samples, and store the rest. A different source, or one whose stored part was altered, is refused; a
        source that has grown at its end is continued.
    progress : callable, optional
        Called with the number of samples read since the previous call, those that are stored already included.

    Returns
    -------
    int
        Number of samples in the folder.

    Raises
    ------
    FileExistsError
        If the folder has shards, and `resume` is False.
    FormatError
        If a file is malformed, of no such kind, or has values that cannot be stored, such as nulls; or if there is no
        sample; or if files that are resumed do not begin with the samples that the folder has.
    ImportError
        If PyArrow is needed and not installed.
    TypeError, ValueError, OSError, AuthenticationError
        As from `DatasetWriter`.

    Examples
    --------
    >>> import pathlib
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> _ = pathlib.Path("cities.jsonl").write_text('{"name": "Oslo", "size": 709037}')
    >>> fastrack.import_samples("cities.jsonl", "cities", key)
    1
    >>> data = fastrack.SealedDataset("cities", keys=key, transform=lambda city: (city["name"], int(city["size"])))
    >>> data[0]
    (b'Oslo', 709037)
    """
    with DatasetWriter(folder, key, shard_size=shard_size) as writer:
        if writer.stored and not resume:
            advice = "Choose another folder, or resume that run with its source (resume=, --resume)"
            raise FileExistsError(errno.EEXIST, f"has {writer.stored} samples already. {advice}", os.fspath(folder))
        expected = writer.expect_stored() if writer.stored else None
        opened, count = open_source(source, locate_local(folder)), 0
        while True:
            try:
                file, batch = next(opened.batches, (None, None))
                if batch is None:
                    break
                writer.write_batch_of(batch, file)
            except (TypeError, ValueError) as error:
                if opened.current is None or str(opened.current) in str(error):
                    raise
                raise FormatError(f"{opened.current}: {error}") from None
            read = len(next(iter(batch.values())))
            count += read
            if progress is not None:
                progress(read)
        if expected is not None:
            expected.require_all_taken()
        if not count:
            at = opened.paths[0] if opened.paths else "import_samples"
            raise FormatError(f"{at}: expected a sample or more, got none. Name another source")
    return count
