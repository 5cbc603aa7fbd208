"""Read the certificates that a host of SEV-SNP hands to its guests: the ``auxblob`` of configfs-tsm.

Form: AMD 56421 (GHCB), version 2.03, section 4.1.8.1: entries of a GUID, an offset and a length, ended by zeros.
"""

from __future__ import annotations

from uuid import UUID

from cryptography.hazmat.primitives.serialization import Encoding

from fastrack.attest._errors import malformed
from fastrack.attest._formats.binary import Cursor
from fastrack.attest._formats.x509 import load_certificate, load_chain

_DOCUMENT = "certificate table"
_MOST = 32  # entries
_GUIDS = {
    UUID("63da758d-e664-4564-adc5-f4b93be8accd"): "leaf",  # VCEK
    UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"): "leaf",  # VLEK
    UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782"): "ask",
    UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae"): "ark",
    UUID("92f81bc3-5811-4d3d-97ff-d19f88dc67ea"): "crl",
}


def read_certificate_table(data: bytes) -> dict[str, bytes]:
    """Return what a table has of the leaf, its issuers in PEM, and the revocation list, by the names of `SnpEvidence`.

    Raise `FormatError` if it is malformed.
    """
    table, found = Cursor(data, _DOCUMENT), dict[str, bytes]()
    for _ in range(_MOST):
        if table.remaining < 24:
            break
        guid = UUID(bytes_le=table.take(16, "GUID"))
        offset, size = table.u32("offset"), table.u32("length")
        if not guid.int:
            break
        if not 0 < size <= len(data) - offset:
            raise malformed(_DOCUMENT, "length", table.offset - 4, wanted=f"1 to {len(data) - offset}", found=size)
        if name := _GUIDS.get(guid):
            found[name] = data[offset : offset + size]
    issuers = [found.pop(name) for name in ("ask", "ark") if name in found]
    if len(issuers) == 2:
        found["issuers"] = b"".join(map(_to_pem, issuers))
    return found


def _to_pem(data: bytes) -> bytes:
    """Return a certificate in PEM, which hosts hand out so or in DER."""
    if data.startswith(b"-----"):
        certificates = load_chain(data, evidence=_DOCUMENT)
    else:
        certificates = (load_certificate(data, evidence=_DOCUMENT),)
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)
