"""Read the identity of an NVIDIA device from its certificates, which follow TCG's DICE.

An extension holds the digest of a key's firmware (FWID). Blackwell uses TcbInfo, 2.23.133.5.4.1.1, of TCG's "DICE
Attestation Architecture". Hopper and LS10 use 2.23.133.5.4.1 with a version, the public key of the device and the
digest, like RIoT's CompositeDeviceID.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fastrack._util.public import public
from fastrack.attest._errors import malformed, refused
from fastrack.attest._formats import der
from fastrack.attest._formats.binary import Cursor
from fastrack.attest._formats.x509 import VerifiedChain, extension_value, subject_name
from fastrack.attest._gpus.report import DIGEST_SIZE

_CHAIN_LENGTH = 5  # leaf, device, provisioner, identity of the family, root
_COMPOSITE_DEVICE_ID = "2.23.133.5.4.1"
_TCB_INFO = "2.23.133.5.4.1.1"
_FWIDS_TAG = 0xA6  # [6] IMPLICIT SEQUENCE OF FWID, in TcbInfo
_SHA384 = "2.16.840.1.101.3.4.2.2"
_OTHER = "The certificates are not those of a GPU or NVSwitch; ask the device for its report and chain again."


@public
class GpuArchitecture(StrEnum):
    """The generation of an NVIDIA device.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.GpuArchitecture.HOPPER.value
    'hopper'
    """

    HOPPER = "hopper"
    BLACKWELL = "blackwell"
    NVSWITCH = "nvswitch"


_ARCHITECTURES = (
    (re.compile(r"GH\d{3}"), GpuArchitecture.HOPPER),
    (re.compile(r"GB\d{3}"), GpuArchitecture.BLACKWELL),
    (re.compile(r"LS_10"), GpuArchitecture.NVSWITCH),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The claims in a device's certificates. `VerifiedGpuReport` describes them."""

    architecture: GpuArchitecture
    model: str
    chip: str
    chip_id: str
    ueid: int
    fwid: bytes


def read_identity(chain: VerifiedChain, *, evidence: str) -> Identity:
    """Read the identity of a device, and require that all certificates are of one chip.

    NVIDIA's authorities chose the names of provisioner and device; the device's boot ROM chose the leaf's name.
    """
    if len(chain.certificates) != _CHAIN_LENGTH:
        count = len(chain.certificates)
        raise refused(evidence, "number of certificates", wanted=_CHAIN_LENGTH, found=count, advice=_OTHER)
    leaf, device, provisioner = map(subject_name, chain.certificates[:3])
    part = device.split(" ")[0]
    architecture = next((known for pattern, known in _ARCHITECTURES if pattern.fullmatch(part)), None)
    if architecture is None:
        raise refused(evidence, "chip", wanted="GH..., GB... or LS_10", found=device, advice=_OTHER)
    if leaf.split(" ")[0] != part or not provisioner.startswith(f"NVIDIA {part} Provisioner "):
        names = f"{leaf!r}, {device!r} and {provisioner!r}"
        raise refused(evidence, "subjects", wanted=f"three certificates of {part}", found=names, advice=_OTHER)
    chip_id = read_serial(chain.issuer, evidence)
    if (value := extension_value(chain.leaf, _COMPOSITE_DEVICE_ID)) is not None:
        fwid = _read_composite_device_id(value, chain.issuer, evidence)
    elif (value := extension_value(chain.leaf, _TCB_INFO)) is not None:
        fwid = _read_tcb_info(value, evidence)
    else:
        wanted = f"the extension {_COMPOSITE_DEVICE_ID} or {_TCB_INFO}"
        raise malformed(evidence, "firmware id", None, wanted=wanted, found="neither")
    return Identity(architecture, device, part.replace("_", ""), chip_id, chain.leaf.serial_number, fwid)


def read_serial(device: x509.Certificate, evidence: str) -> str:
    """Return the id of a chip, the serial number in the name of its own certificate."""
    numbers = device.subject.get_attributes_for_oid(x509.NameOID.SERIAL_NUMBER)
    text = str(numbers[0].value) if len(numbers) == 1 else ""
    if not re.fullmatch(r"[0-9A-F]{16,40}", text):
        wanted = "one serial number in hexadecimal in the name of the device"
        raise malformed(evidence, "chip id", None, wanted=wanted, found=text or f"{len(numbers)} of them")
    return text


def _read_composite_device_id(value: bytes, device: x509.Certificate, evidence: str) -> bytes:
    members = der.open_value(value, evidence, der.SEQUENCE, "composite device id")
    version_offset = members.offset
    version = der.read_integer(members, "version")
    if version != 1:
        raise malformed(evidence, "version", version_offset, wanted=1, found=version)
    key = der.read(members, der.SEQUENCE, "key of the device").rest("key of the device")
    encoded = device.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if not encoded.endswith(key) or len(encoded) - len(key) != 2:  # without the outer tag and length
        raise refused(evidence, "key of the device", wanted="that of the issuer", found="another", advice=_OTHER)
    digest = _read_digest(members)
    members.done()
    return digest


def _read_tcb_info(value: bytes, evidence: str) -> bytes:
    """Read the first digest, of the firmware; the second is empty."""
    members = der.open_value(value, evidence, der.SEQUENCE, "TCB info")
    digests: list[bytes] = []
    next_tag = 0
    while members.remaining:
        offset = members.offset
        tag, content = der.read_element(members, "TCB info")
        if tag & 0x1F < next_tag:
            raise malformed(evidence, "TCB info", offset, wanted="members in order", found=f"the tag {tag:#04x}")
        next_tag = (tag & 0x1F) + 1
        while tag == _FWIDS_TAG and content.remaining:
            digests.append(_read_digest(content))
    if not digests:
        raise malformed(evidence, "TCB info", None, wanted="a firmware id", found="none")
    return digests[0]


def _read_digest(cursor: Cursor) -> bytes:
    """Read an FWID: the object identifier of SHA-384, and a digest."""
    pair = der.read(cursor, der.SEQUENCE, "firmware id")
    offset = pair.offset
    algorithm = der.read_oid(pair, "algorithm of the firmware id")
    digest = der.read_bytes(pair, der.OCTET_STRING, "firmware id")
    pair.done()
    if algorithm != _SHA384 or len(digest) != DIGEST_SIZE:
        other = f"{len(digest)} bytes of {algorithm}"
        raise malformed(pair.structure, "firmware id", offset, wanted="a digest of SHA-384", found=other)
    return digest
