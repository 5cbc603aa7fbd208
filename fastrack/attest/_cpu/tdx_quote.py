"""Parse quotes of Intel TDX, versions 4 and 5.

Layouts: Intel, "Intel TDX DCAP Quote Generation Library", appendix A.3 (version 4) and A.4 (version 5). All integers
are little-endian.
"""

from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from fastrack._util.public import public
from fastrack.attest._errors import malformed
from fastrack.attest._formats.binary import Cursor

_TDX = 0x81  # the TEE type
_ECDSA_P256 = 2  # the type of the attestation key
_INTEL_VENDOR: Final = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
_TD_1_0, _TD_1_5 = 2, 3  # body types of version 5
# Bodies have the fields of `TdReport` in order, with four registers; `_QE_BODY` the fields of `QeReport` after `data`.
_BODIES = {_TD_1_0: Struct("<16s48s48s8sQQ48s48s48s48s48s48s48s48s64s")}
_BODIES[_TD_1_5] = Struct(f"{_BODIES[_TD_1_0].format}16s48s")
_QE_BODY = Struct("<16x4s28x16s64x32s96xHH60x64s")
_PCK_CHAIN, _QE_REPORT = 5, 6  # types of certification data

EVIDENCE = "TDX quote"


@public
@dataclass(frozen=True, slots=True)
class TdReport:
    """Measurements and attributes of a trust domain (TD), by Intel's names in lower case.

    Attributes
    ----------
    tee_tcb_svn : bytes
        Security versions of the TDX module and SEAM, 16 bytes. Byte 1 is the module's version.
    mrtd, mrseam, mrsignerseam : bytes
        Measurements of the initial memory of the TD, of the TDX module and of its signer, 48 bytes each.
    seam_attributes : bytes
        Attributes of the TDX module, 8 bytes.
    td_attributes, xfam : int
        Attributes of the TD (see `is_debug`), and the extended features it may use, 64 bits each.
    mrconfigid, mrowner, mrownerconfig : bytes
        Identifiers that the host sets, 48 bytes each.
    rtmrs : tuple of bytes
        The four run-time measurement registers, 48 bytes each.
    report_data : bytes
        64 bytes chosen by the TD.
    tee_tcb_svn2, mrservicetd : bytes or None
        Present security versions, and the measurement of service TDs; TDX 1.5 and later.

    Examples
    --------
    >>> from fastrack import attest
    >>> registers = [bytes(16), bytes(48), bytes(48), bytes(8), 1, 0, *[bytes(48)] * 4, (bytes(48),) * 4, bytes(64)]
    >>> report = attest.TdReport(*registers)
    >>> report.is_debug, report.is_migratable
    (True, False)
    """

    tee_tcb_svn: bytes
    mrseam: bytes
    mrsignerseam: bytes
    seam_attributes: bytes
    td_attributes: int
    xfam: int
    mrtd: bytes
    mrconfigid: bytes
    mrowner: bytes
    mrownerconfig: bytes
    rtmrs: tuple[bytes, bytes, bytes, bytes]
    report_data: bytes
    tee_tcb_svn2: bytes | None = None
    mrservicetd: bytes | None = None

    @property
    def is_debug(self) -> bool:
        """A bit of the group TUD (0 to 7, DEBUG is 0) is set: the host can read the TD's memory."""
        return bool(self.td_attributes & 0xFF)

    @property
    def is_migratable(self) -> bool:
        """The bit MIGRATABLE (29) is set: the TD can move to another machine."""
        return bool(self.td_attributes >> 29 & 1)


@dataclass(frozen=True, slots=True)
class QeReport:
    """The report of the quoting enclave (QE) on the attestation key, an SGX report of 384 bytes."""

    data: bytes = field(repr=False)
    miscselect: bytes
    attributes: bytes
    mrsigner: bytes
    isv_prod_id: int
    isv_svn: int
    report_data: bytes


@public
@dataclass(frozen=True, slots=True)
class TdxQuote:
    """A parsed quote. All values are untrusted until `verify_tdx_quote` has verified them.

    `version` is 4 or 5, `report` has the claims, and `data` is the whole quote without trailing bytes.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.TdxQuote.__match_args__[:3]
    ('version', 'report', 'data')
    """

    version: int
    report: TdReport
    data: bytes = field(repr=False)
    user_data: bytes = field(repr=False)
    signed: bytes = field(repr=False)
    signature: bytes = field(repr=False)
    attestation_key: bytes = field(repr=False)
    qe_report: QeReport = field(repr=False)
    qe_signature: bytes = field(repr=False)
    qe_auth_data: bytes = field(repr=False)
    pck_chain: bytes = field(repr=False)


@public
def parse_tdx_quote(data: bytes) -> TdxQuote:
    """Parse a quote of Intel TDX, of version 4 or 5. Nothing is verified.

    It comes from ``/sys/kernel/config/tsm/report/*/outblob``. Only zero bytes may follow it.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.parse_tdx_quote(bytes([4, 0, 2, 0, 0x81]))
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the TDX quote failed: expected 4 bytes as its TEE type at offset 4, got 1 ...
    """
    cursor = Cursor(data, EVIDENCE)
    version = cursor.u16("version")
    if version not in {4, 5}:
        raise malformed(EVIDENCE, "version", 0, wanted="4 or 5", found=version)
    cursor.expect(_ECDSA_P256.to_bytes(2, "little"), "type of the attestation key")
    cursor.expect(_TDX.to_bytes(4, "little"), "TEE type")
    cursor.take(4, "reserved")  # signed; security versions in some versions of the layout
    cursor.expect(_INTEL_VENDOR, "QE vendor")
    user_data = cursor.take(20, "user data")
    body_type = _read_body_type(cursor) if version == 5 else _TD_1_0
    body = _BODIES[body_type]
    values = body.unpack(cursor.take(body.size, f"{EVIDENCE}, TD report"))
    values = (*values[:10], values[10:14], *values[14:])
    signed = data[: cursor.offset]
    signatures = cursor.part(cursor.u32("size of the signature data"), f"{EVIDENCE}, signature data")
    end = cursor.offset
    cursor.zeros(cursor.remaining, "padding")
    signature = signatures.take(64, "signature")
    attestation_key = signatures.take(64, "attestation key")
    certification = _read_certification(signatures, _QE_REPORT)
    signatures.done()
    qe_report = certification.take(_QE_BODY.size, "QE report")
    qe_signature = certification.take(64, "signature of the QE report")
    qe_auth_data = certification.take(certification.u16("size of the QE authentication data"), "QE authentication data")
    chain = _read_certification(certification, _PCK_CHAIN)
    certification.done()
    return TdxQuote(
        version=version,
        report=TdReport(*values),
        data=data[:end],
        user_data=user_data,
        signed=signed,
        signature=signature,
        attestation_key=attestation_key,
        qe_report=QeReport(qe_report, *_QE_BODY.unpack(qe_report)),
        qe_signature=qe_signature,
        qe_auth_data=qe_auth_data,
        pck_chain=chain.rest("PCK chain"),
    )


def _read_body_type(cursor: Cursor) -> int:
    offset = cursor.offset
    body_type = cursor.u16("type of the body")
    if body_type not in _BODIES:
        raise malformed(EVIDENCE, "type of the body", offset, wanted="2 or 3, of a TD", found=body_type)
    cursor.expect(_BODIES[body_type].size.to_bytes(4, "little"), "size of the body")
    return body_type


def _read_certification(cursor: Cursor, wanted: int) -> Cursor:
    cursor.expect(wanted.to_bytes(2, "little"), "type of the certification data")
    return cursor.part(cursor.u32("size of the certification data"), f"{EVIDENCE}, certification data {wanted}")
