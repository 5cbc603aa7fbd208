"""Tours: one model trained on the data of several holders in turn, where keys travel in place of devices.

At each visit an accelerator proves what it is to the owner of the model and to one holder of data. The owner grants it
the key of the model as the visit before left it and a fresh key for the next version; the holder grants it the keys of
its data. The data go sealed to one buffer of the device, which is overwritten and read back at the end. A receipt,
signed by a key that was made for this visit alone and chained to the receipt before, says what was opened.

Who brings the model from one visit to the next needs no trust and holds no key: NVFlare (``fastrack.tour.nvflare``),
the driver ``fastrack tour run``, or a copied folder.
"""

from fastrack._util.public import lazy

_NAMES = {
    "_buffer": ("DataBuffer",),
    "_chain": ("Chain",),
    "_code": ("code_digest", "code_files"),
    "_desk": ("Terms",),
    "_documents": ("Completion", "Consent", "Delegation", "ModelVersion", "Plan", "Receipt"),
    "_finish": ("finish",),
    "_holder": ("HolderDesk",),
    "_http": ("RemoteDesk", "serve"),
    "_ledger": ("TourLedger",),
    "_owner": ("OwnerDesk", "model_key"),
    "_visit": ("start", "visit"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names of one table
__getattr__, __dir__ = lazy(__name__, _NAMES, globals())
