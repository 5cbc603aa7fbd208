"""Parse attestation reports of NVIDIA's GPUs and NVSwitches.

A report is a GET_MEASUREMENTS request of SPDM 1.1 and the MEASUREMENTS response to it, one after the other. Layouts:
DMTF DSP0274 1.1, section 10.11. Fields of the opaque data, and their encodings: NVIDIA, attestation-sdk,
`gpu_opaque_data_parser` and `switch_opaque_data_parser`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from fastrack._util.public import public
from fastrack.attest._errors import malformed
from fastrack.attest._formats.binary import Cursor

EVIDENCE = "GPU report"
SIGNATURE_SIZE = 96  # r and s of ECDSA on P-384
NONCE_SIZE = 32
DIGEST_SIZE = 48  # SHA-384

_VERSION, _REQUEST, _RESPONSE = b"\x11", b"\xe0", b"\x60"
_SIGNED, _ALL_MEASUREMENTS = b"\x01", b"\xff"
_DMTF = b"\x01"  # the measurement specification
_RAW = 0x80  # flag of a value's type: no digest
_LATER_FORMAT = b"NVDAOD"  # starts opaque data with a header and typed fields


class OpaqueField(IntEnum):
    """The decoded fields of the opaque data, with their names in errors. Other fields are kept raw."""

    label: str

    def __new__(cls, number: int, label: str) -> Self:
        """Make a member whose value is only the number."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.label = label
        return member

    DRIVER_VERSION = 3, "driver version"
    VBIOS_VERSION = 6, "VBIOS version"
    NVDEC_STATUS = 11, "status of the video decoder"
    CHIP_SKU = 15, "chip SKU"
    PROJECT = 17, "project"
    PROJECT_SKU = 18, "project SKU"
    FWID = 20, "firmware id"
    PROTECTED_PCIE = 21, "status of protected PCIe"
    DEVICE_ID = 22, "linked switches"  # with reversed bytes; for a switch, the switch's id
    LOCK = 25, "lock"
    LINKED_GPUS = 26, "linked GPUs"
    VERSION = 34, "version of the opaque data"
    CHIP = 35, "chip"
    FEATURE_FLAG = 36, "feature flag"


@public
@dataclass(frozen=True, slots=True)
class GpuReport:
    """A parsed report. All values are untrusted: `verify_gpu_report` returns proved values.

    `data` is the whole report without trailing bytes: `signed`, and r and s of an ECDSA signature on P-384, 48 bytes
    each, big-endian. `nonce` is the request's, 32 bytes. `measurements` are SHA-384 digests by index, from 0 as in
    reference manifests (SPDM counts from 1), and `opaque` has the fields of the opaque data by number.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.GpuReport.__match_args__[:3]
    ('data', 'signed', 'signature')
    """

    data: bytes
    signed: bytes
    signature: bytes
    nonce: bytes
    measurements: tuple[bytes, ...]
    opaque: tuple[tuple[int, bytes], ...]

    def field(self, number: int) -> bytes | None:
        """Return a field of the opaque data; None if it is absent."""
        return dict(self.opaque).get(number)


@public
def parse_gpu_report(data: bytes) -> GpuReport:
    """Parse a report of a GPU or NVSwitch, without verification.

    It is the request and the response, from ``nvmlDeviceGetConfComputeGpuAttestationReport``. Only zero bytes may
    follow.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.parse_gpu_report(b"")
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the GPU report failed: expected 1 bytes as its SPDM version of the request ...
    """
    data = bytes(data)
    cursor = Cursor(data, EVIDENCE)
    cursor.expect(_VERSION, "SPDM version of the request")
    cursor.expect(_REQUEST, "code of the request")
    cursor.expect(_SIGNED, "attributes of the request")
    cursor.expect(_ALL_MEASUREMENTS, "measurement operation")
    nonce = cursor.take(NONCE_SIZE, "nonce")
    cursor.u8("slot of the request")
    cursor.expect(_VERSION, "SPDM version of the response")
    cursor.expect(_RESPONSE, "code of the response")
    cursor.u8("first parameter of the response")
    cursor.u8("slot of the response")
    count = cursor.u8("number of measurement blocks")
    measurements = _read_measurements(cursor.part(cursor.u24("size of the measurement record"), "record"), count)
    cursor.take(NONCE_SIZE, "nonce of the response")
    opaque = _read_opaque(cursor, cursor.u16("size of the opaque data"))
    signed = data[: cursor.offset]
    signature = cursor.take(SIGNATURE_SIZE, "signature")
    data = data[: cursor.offset]
    cursor.zeros(cursor.remaining, "padding")  # of the driver's buffer, longer than a report
    return GpuReport(data, signed, signature, nonce, measurements, opaque)


def _read_measurements(cursor: Cursor, count: int) -> tuple[bytes, ...]:
    """Read the measurement record: blocks with a digest each, and with indexes in sequence."""
    measurements = []
    for index in range(1, count + 1):
        cursor.expect(bytes([index]), "measurement index")
        cursor.expect(_DMTF, "measurement specification")
        block = cursor.part(cursor.u16("size of a measurement"), f"measurement {index}")
        kind_offset = block.offset
        kind = block.u8("type of the value")
        if kind & _RAW:
            raise malformed(block.structure, "type of the value", kind_offset, wanted="a digest", found=f"{kind:#04x}")
        size_offset = block.offset
        size = block.u16("size of the value")
        if size != DIGEST_SIZE:
            raise malformed(block.structure, "size of the value", size_offset, wanted=DIGEST_SIZE, found=size)
        measurements.append(block.take(size, "value"))
        block.done()
    cursor.done()
    return tuple(measurements)


def _read_opaque(whole: Cursor, size: int) -> tuple[tuple[int, bytes], ...]:
    offset = whole.offset
    data = whole.take(size, "opaque data")
    if data.startswith(_LATER_FORMAT):
        wanted, later = "fields without a header", f"the later format {_LATER_FORMAT.decode()}"
        raise malformed("opaque data", "format", offset, wanted=wanted, found=later)
    cursor = Cursor(data, "opaque data", start=offset)
    fields: dict[int, bytes] = {}
    while cursor.remaining:
        start = cursor.offset
        number, length = cursor.u16("number of a field"), cursor.u16("size of a field")
        if number in fields:
            raise malformed(cursor.structure, "number of a field", start, wanted="each once", found=f"{number} twice")
        fields[number] = cursor.take(length, f"field {number}")
    return tuple(fields.items())
