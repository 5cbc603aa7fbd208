"""Read Intel's extension of PCK certificates.

Layout: Intel, "Intel SGX PCK Certificate and Certificate Revocation List Profile Specification", section 1.3.5.
"""

from dataclasses import dataclass

from cryptography import x509

from fastrack._util.public import public
from fastrack.attest._errors import malformed
from fastrack.attest._formats import der
from fastrack.attest._formats.binary import Cursor
from fastrack.attest._formats.x509 import extension_value

_OID = "1.2.840.113741.1.13.1"
# The encoded identifiers of the members: the identifier of the extension, and then one byte for each arc.
_BASE = bytes.fromhex("2a864886f84d010d01")
_PPID, _TCB, _PCE_ID, _FMSPC = (_BASE + bytes([number]) for number in (1, 2, 3, 4))
_COMPONENTS = tuple(_TCB + bytes([number]) for number in range(1, 17))
_PCE_SVN, _CPU_SVN = _TCB + b"\x11", _TCB + b"\x12"

EVIDENCE = "PCK certificate"


@public
@dataclass(frozen=True, slots=True)
class PckIdentity:
    """The platform of a PCK certificate, and its security versions.

    `ppid` is the identifier of the platform, 16 bytes; `fmspc` the family, model, stepping, platform and custom SKU, 6
    bytes, which select the collateral; `pce_id` the identifier of the provisioning certification enclave, 2 bytes,
    and `pce_svn` its security version. `cpu_svn` is the raw security version of the CPU, 16 bytes, and `components`
    the versions of the 16 TCB components.

    Examples
    --------
    >>> from fastrack import attest
    >>> platform = attest.PckIdentity(bytes(16), bytes.fromhex("b0c06f000000"), bytes(2), 11, bytes(16), (0,) * 16)
    >>> platform.fmspc.hex()
    'b0c06f000000'
    """

    ppid: bytes
    fmspc: bytes
    pce_id: bytes
    pce_svn: int
    cpu_svn: bytes
    components: tuple[int, ...]


def read_pck_identity(certificate: x509.Certificate) -> PckIdentity:
    """Read Intel's extension of a PCK certificate."""
    value = extension_value(certificate, _OID)
    if value is None:
        raise malformed(EVIDENCE, "SGX extension", None, wanted=f"the extension {_OID}", found="none")
    members = _read_members(der.open_value(value, EVIDENCE, der.SEQUENCE, "SGX extension"), "SGX extension")
    tcb = _read_members(der.read(_find(members, _TCB, "TCB"), der.SEQUENCE, "TCB"), "TCB")
    return PckIdentity(
        ppid=_read_octets(members, _PPID, "PPID", 16),
        fmspc=_read_octets(members, _FMSPC, "FMSPC", 6),
        pce_id=_read_octets(members, _PCE_ID, "PCEID", 2),
        pce_svn=der.read_integer(_find(tcb, _PCE_SVN, "PCESVN"), "PCESVN"),
        cpu_svn=_read_octets(tcb, _CPU_SVN, "CPUSVN", 16),
        components=tuple(der.read_integer(_find(tcb, oid, "component SVN"), "component SVN") for oid in _COMPONENTS),
    )


def _read_members(cursor: Cursor, field: str) -> dict[bytes, Cursor]:
    """Read pairs of identifier and value, and return a cursor on each value, by identifier."""
    members: dict[bytes, Cursor] = {}
    while cursor.remaining:
        offset = cursor.offset
        pair = der.read(cursor, der.SEQUENCE, field)
        oid = der.read_bytes(pair, der.OBJECT_IDENTIFIER, field)
        if oid in members:
            raise malformed(EVIDENCE, field, offset, wanted="each member once", found=f"{oid.hex()} twice")
        members[oid] = pair
    return members


def _find(members: dict[bytes, Cursor], oid: bytes, field: str) -> Cursor:
    if oid not in members:
        raise malformed(EVIDENCE, field, None, wanted=f"the member {oid.hex()}", found="none")
    return members[oid]


def _read_octets(members: dict[bytes, Cursor], oid: bytes, field: str, size: int) -> bytes:
    value = der.read_bytes(_find(members, oid, field), der.OCTET_STRING, field)
    if len(value) != size:
        raise malformed(EVIDENCE, field, None, wanted=f"{size} bytes", found=f"{len(value)} bytes")
    return value
