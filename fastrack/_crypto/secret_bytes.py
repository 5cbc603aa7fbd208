"""Secret bytes that are overwritten when the object is deleted."""

from __future__ import annotations


class SecretBytes(bytearray):
    """The bytes of a secret, overwritten when the object is deleted.

    A view keeps the object alive, so no view outlives the bytes. `__del__` binds the type `bytes` in advance, since the
    interpreter may delete all global names before the call.
    """

    def wipe(self) -> None:
        """Overwrite the bytes with zeros."""
        self[:] = bytes(len(self))

    def __del__(self, zeros: type[bytes] = bytes) -> None:
        self[:] = zeros(self.__len__())
