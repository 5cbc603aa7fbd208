"""Sealed datasets in Ray Data and Ray Train: rows travel as numbers, and are opened in the training worker.

Ray moves tables through its object store, and spills them to disk. The tables of a `SealedDatasource` hold no data: a
row has the id of its dataset, and its number. Shuffling, splitting and limiting move these numbers, and
`SealedCollateFn` opens the rows of a batch in the process that uses them, from the sealed files, with its own keys.
Neither keys nor plaintext nor ciphertext are in Ray's object store or in its spill folder.

It requires ``ray[data]``, as in the extra ``fastrack-io[ray]``.

Examples
--------
>>> import fastrack, fastrack.ray, ray  # doctest: +SKIP
>>> data = fastrack.SealedDataset("/data/train.safetensors")  # doctest: +SKIP
>>> rows = ray.data.read_datasource(fastrack.ray.SealedDatasource(data)).random_shuffle()  # doctest: +SKIP
>>> collate = fastrack.ray.SealedCollateFn(data, keys="/run/secrets/owner.key")  # doctest: +SKIP
>>> for batch in rows.iter_torch_batches(batch_size=64, collate_fn=collate):  # doctest: +SKIP
...     batch["images"].shape
torch.Size([64, 3, 32, 32])
"""

from __future__ import annotations

from fastrack._util.extras import require

require("ray", "fastrack.ray", "ray")

from fastrack.ray._data import SealedCollateFn, SealedDatasource  # noqa: E402 - after the check for Ray

__all__ = ["SealedCollateFn", "SealedDatasource"]

for _name in __all__:
    globals()[_name].__module__ = "fastrack.ray"  # the path that users import them from
