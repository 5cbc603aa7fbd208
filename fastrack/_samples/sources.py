"""`import_samples`: samples of files, folders, tables and iterables, sealed into shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from fastrack._keys.keyring import KeyLike
from fastrack._samples import readers
from fastrack._samples.blocks import Column
from fastrack._samples.csv.cell_types import Schema
from fastrack._samples.imports import Batches, Import
from fastrack._util.locations import locate_target
from fastrack._util.public import public


@public
def import_samples(
    source: Any,
    folder: str | os.PathLike[str],
    key: KeyLike | None = None,
    *,
    shard_size: int = 256 << 20,
    resume: bool = False,
    append: bool = False,
    skip_existing: bool = False,
    columns: Sequence[str] | None = None,
    records: Iterable[str] = (),
    nulls: Collection[str] = (),
    types: Mapping[str, str | type] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    r"""Seal samples that you have into a folder of shards, which `SealedDataset` opens.

    The samples pass through memory, at most a shard of them, and no plaintext is written.

    Parameters
    ----------
    source : path, sequence of paths, or object
        - A folder of images, or of folders of images by class: the columns "image" (the bytes of the file), "label"
          (the number of the class, in alphabetical order) and "path", in the order of torchvision's ``ImageFolder``.
        - A folder of ``.npy`` files, or of folders of them by class: "array", "label" and "path". They have one dtype
          and shape, or one dimension and any length.
        - ``.csv`` and ``.tsv`` with a header: a column for each name there. It is I64 or F64 if each of its cells is
          empty or such a number, and else text, exactly as it stands: ``007`` stays text, and so does a number with
          more digits than a float gives back. Cells are separated by commas, semicolons or tabs, whichever the
          header has, and have at most 2**28 characters. The index that pandas writes without a name is "index".
          Empty lines are left out; between rows of one column they are empty cells.
        - ``.txt``: "text", a record for each line, without its end.
        - ``.jsonl``: a column for each member of the objects, in the order in which they come. Text, numbers and lists
          of numbers are stored as such, and other values, or such values mixed, as JSON. A member that is missing is a
          null, as one that is ``null``.
        - ``.tar``, as of WebDataset: a column for each ending of the files with one name, and "__key__". "cls" is a
          number, all others are bytes.
        - ``.parquet``, ``.arrow`` and ``.feather``, with PyArrow: a column for each of theirs. Numbers are copied,
          dates become the integers that Arrow stores; text, bytes, lists of numbers and decimals (as text) are records,
          and what else nests is JSON.
        - A folder of files of one of these kinds, in the order of their names, without folders among them, or several
          such files.
        - A table of PyArrow, pandas, polars or DuckDB, or another object with ``__arrow_c_stream__``, a
          ``pyarrow.dataset.Dataset`` or a ``datasets.Dataset``, as a Parquet file. The index of a DataFrame is a column
          unless it only numbers the rows.
        - An iterable of samples, as `DatasetWriter.write` takes them; with PyArrow also lists, None, dates and dicts.

        Text is UTF-8, or UTF-16 with a byte-order mark. A column ``x`` that has nulls, or empty cells among numbers,
        has NaN there if it is of floats, else 0, False or an empty record, and beside it is a column ``x.valid``
        (BOOL), which is False there. A NaN of the source is a value.
    folder, key, shard_size
        As for `DatasetWriter`.
    resume : bool
        Continue the last run in a folder that has shards: read its source from the start again, compare its first
        samples with the stored ones, and store the rest. A different source, or one whose stored part was altered, is
        refused, and so is one that has no more than an interrupted run had stored; a source that has grown at its end
        is continued.
    append : bool
        Add all samples of the source to a dataset, whose last run came to its end, with the same columns.
    skip_existing : bool
        With `append` or `resume`: leave out the files that the dataset has, by their names, after a comparison with
        what it has of them. A file that has changed is refused, and so is one under a new name. All files are read
        before a sample is stored.
    columns : sequence of str, optional
        The columns to store, in this order. By default all that the source has.
    records : iterable of str
        Columns of arrays of one dimension that differ in length, as for `DatasetWriter`.
    nulls : collection of str
        Of CSV: cells that stand for a null, beside empty ones among numbers, such as ``["NA", "null"]``; with ``""``
        also empty ones among texts.
    types : mapping of str to str, optional
        Of CSV: the type of columns by their names: "int" (I64), "float" (F64: digits beyond one are rounded), "bool"
        (true and false, 1 and 0) or "text". A cell that has none is an error.
    progress : callable, optional
        Called with the number of samples read since the previous call, those that are stored already included.

    Returns
    -------
    int
        Number of samples in the folder.

    Raises
    ------
    FileExistsError
        If the folder has shards, and neither `resume` nor `append` is given; or if it has an import that was
        interrupted, and `append` is given; or if another program writes to the folder at the same time.
    FileNotFoundError
        If the folder has no shards, and `append` is given.
    FormatError
        If a file is malformed, of no such kind, or has values that cannot be stored; or if there is no sample;
        or if files that are resumed do not begin with the samples that the folder has.
    ImportError
        If PyArrow is needed and not installed.
    TypeError, ValueError, OSError, AuthenticationError
        As from `DatasetWriter`.

    Examples
    --------
    >>> import pathlib
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> _ = pathlib.Path("cities.csv").write_text("name,size\nOslo,709037\nLima,10092000\n")
    >>> fastrack.import_samples("cities.csv", "cities", key)
    2
    >>> data = fastrack.SealedDataset("cities", keys=key, transform=lambda city: (city["name"], int(city["size"])))
    >>> data[0]
    (b'Oslo', 709037)
    """
    choices = {"resume": resume, "append": append, "skip_existing": skip_existing, "chosen": columns}
    schema = Schema.of(nulls, types)
    return open_import(source, folder, schema, records=records, **choices).work(key, shard_size, progress)


def open_import(source: Any, folder: str | os.PathLike[str], schema: Schema | None = None, **choices: Any) -> Import:
    """Return the import of a source of `import_samples` into a folder, with the options of `Import`."""
    target = locate_target(folder)
    seen: dict[str, int] = {}

    def open_source(stored: Mapping[str, Column]) -> tuple[readers.Source | None, Batches]:
        opened = readers.open_source(source, target, choices.get("chosen"), seen, stored, schema)
        return (opened if opened.paths else None), opened.batches

    return Import(open_source, target, **choices)
