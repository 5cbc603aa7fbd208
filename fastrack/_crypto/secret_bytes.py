"""Bytes of a secret that are overwritten when they are deleted."""

from __future__ import annotations


class SecretBytes(bytearray):
    """The bytes of a secret, overwritten when the object is deleted.

    A view keeps the object alive, so no view outlives the bytes. `__del__` binds the type `bytes` in advance, since the
    interpreter may have deleted all global names when it is called.
    """

    def wipe(self) -> None:
        """Overwrite them with zeros."""
        self[:] = bytes(len(self))

    def __del__(self, zeros: type[bytes] = bytes) -> None:
        self[:] = zeros(self.__len__())
