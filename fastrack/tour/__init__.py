"""Tours: one model trained on the data of several holders in turn, where keys travel in place of devices.

At each visit an accelerator proves what it is to the owner of the model and to one holder of data. The owner grants it
the key of the model as the visit before left it and a fresh key for the next version; the holder grants it the keys of
its data. The data go sealed to one buffer of the device, which is overwritten and read back at the end. A receipt,
signed by a key that was made for only this visit and chained to the receipt before, says what was opened.

Who brings the model from one visit to the next needs no trust and holds no key: NVFlare (``fastrack.tour.nvflare``),
the driver ``fastrack tour run``, or a copied folder.
"""

from fastrack._util.public import lazy

__getattr__, __dir__ = lazy(globals())
