"""Parse attestation reports of AMD SEV-SNP, versions 2 to 5.

Layout: AMD 56860, "SEV Secure Nested Paging Firmware ABI Specification": tables 3 and 4 (TCB_VERSION), 9 (POLICY),
23 (ATTESTATION_REPORT), 24 (PLATFORM_INFO) and 141 (signature). All integers are little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from fastrack._util.public import public
from fastrack.attest._errors import malformed
from fastrack.attest._formats.binary import Cursor, Layout

SIGNED_SIZE = 0x2A0  # bytes covered by the signature
_VERSIONS = range(2, 6)
_CHIP_ID_OFFSET = 0x1A0
_ECDSA_P384 = 1
SIGNING_KEYS = ("VCEK", "VLEK")  # by their numbers

EVIDENCE = "SNP report"


@public
class SnpProduct(StrEnum):
    """A line of AMD's processors, by root key name.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.SnpProduct("Milan") is attest.SnpProduct.MILAN
    True
    """

    MILAN = "Milan"
    GENOA = "Genoa"
    TURIN = "Turin"


@public
@dataclass(frozen=True, slots=True)
class SnpTcb:
    """The security patch levels (SPL) of a platform's parts. Only Turin has an FMC.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.SnpTcb.unpack(bytes([3, 0, 0, 0, 0, 0, 8, 115]), attest.SnpProduct.MILAN)
    SnpTcb(bootloader=3, tee=0, snp=8, microcode=115, fmc=None)
    """

    bootloader: int
    tee: int
    snp: int
    microcode: int
    fmc: int | None = None

    @classmethod
    def unpack(cls, raw: bytes, product: SnpProduct) -> SnpTcb:
        """Unpack a TCB_VERSION of 8 bytes. Turin has its own layout."""
        if product is SnpProduct.TURIN:
            return cls(fmc=raw[0], bootloader=raw[1], tee=raw[2], snp=raw[3], microcode=raw[7])
        return cls(bootloader=raw[0], tee=raw[1], snp=raw[6], microcode=raw[7])


@public
@dataclass(frozen=True, slots=True)
class SnpReport:
    """A parsed report. All values are untrusted until `verify_snp_report` has verified them.

    Attributes
    ----------
    version, guest_svn, vmpl : int
        2 to 5; the guest's security version, set by its owner; and the privilege level of the software that asked
        for the report, where 0 is the highest.
    product : SnpProduct or None
        The product, by the CPU's family and model in reports of version 3 and later; else None.
    policy, platform_info : int
        The policy of the guest and the state of the platform, 64 bits each. Properties name their bits.
    family_id, image_id : bytes
        Identifiers chosen by the guest's owner, 16 bytes each.
    signing_key : str
        "VCEK", of the chip, or "VLEK", of a cloud provider.
    report_data, host_data : bytes
        64 bytes chosen by the guest, and 32 by the host.
    measurement : bytes
        Measurement of the initial memory of the guest, 48 bytes.
    id_key_digest, author_key_digest : bytes
        Digests of the keys that signed the guest's identity, 48 bytes each.
    report_id, report_id_ma : bytes
        Identifiers of the guest and of its migration agent, 32 bytes each.
    chip_id : bytes
        The identifier of the chip, 64 bytes (Turin uses the first 8). Zeros if the host hides it.
    current_tcb, reported_tcb, committed_tcb, launch_tcb : SnpTcb
        Patch levels: at present, of the signing key, the minimum of the platform, and at launch.
    current_version, committed_version : tuple of int
        The firmware's major and minor number and build.
    launch_mitigations, current_mitigations : int or None
        Mitigation vectors at launch and now, from version 5 on.
    data : bytes
        The whole report.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.SnpReport.__match_args__[:4]
    ('version', 'product', 'guest_svn', 'policy')
    """

    version: int
    product: SnpProduct | None
    guest_svn: int
    policy: int
    family_id: bytes
    image_id: bytes
    vmpl: int
    platform_info: int
    signing_key: str
    report_data: bytes
    measurement: bytes
    host_data: bytes
    id_key_digest: bytes
    author_key_digest: bytes
    report_id: bytes
    report_id_ma: bytes
    chip_id: bytes
    current_tcb: SnpTcb
    reported_tcb: SnpTcb
    committed_tcb: SnpTcb
    launch_tcb: SnpTcb
    current_version: tuple[int, int, int]
    committed_version: tuple[int, int, int]
    launch_mitigations: int | None
    current_mitigations: int | None
    data: bytes = field(repr=False)
    signature: bytes = field(repr=False)

    @property
    def is_debug(self) -> bool:
        """Bit 19 of the policy is set: the host may read the guest's memory."""
        return bool(self.policy >> 19 & 1)

    @property
    def is_migratable(self) -> bool:
        """Bit 18 of the policy is set: a migration agent may move the guest to another machine."""
        return bool(self.policy >> 18 & 1)

    @property
    def allows_smt(self) -> bool:
        """Bit 16 of the policy is set: the guest may run with SMT."""
        return bool(self.policy >> 16 & 1)

    @property
    def has_smt(self) -> bool:
        """Bit 0 of the platform's state is set: SMT is on."""
        return bool(self.platform_info & 1)

    @property
    def is_alias_checked(self) -> bool:
        """Bit 5 of the platform's state is set: memory was checked for aliased addresses."""
        return bool(self.platform_info >> 5 & 1)


@public
def parse_snp_report(data: bytes) -> SnpReport:
    """Parse a report of AMD SEV-SNP, of version 2 to 5. Nothing is verified.

    The report has 1184 bytes, from ``/sys/kernel/config/tsm/report/*/outblob``.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.parse_snp_report(bytes([9, 0, 0, 0]))
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the SNP report failed: expected 2 to 5 as its VERSION at offset 0, got 9...
    """
    cursor = Cursor(data, EVIDENCE)
    version = cursor.u32("VERSION")
    if version not in _VERSIONS:
        raise malformed(EVIDENCE, "VERSION", 0, wanted="2 to 5", found=version)
    values = cursor.fields(_BEGINNING)
    product = _read_product(cursor) if version > 2 else None
    cursor.take(_CHIP_ID_OFFSET - cursor.offset, "reserved")
    values |= cursor.fields(_PLATFORM)
    for name in ("launch", "current"):
        values[f"{name}_mitigations"] = cursor.u64(f"{name.upper()}_MIT_VECTOR") if version > 4 else None
    cursor.take(SIGNED_SIZE - cursor.offset, "reserved")
    signature = _read_signature(cursor)
    cursor.done()
    for name in ("current_tcb", "reported_tcb", "committed_tcb", "launch_tcb"):
        values[name] = SnpTcb.unpack(values[name], product or SnpProduct.MILAN)  # version 2 is older than Turin
    return SnpReport(version=version, product=product, data=data, signature=signature, **values)


def _read_signing_key(cursor: Cursor, field: str) -> str:
    """Read the signing key from bits 2 to 4 of the flags."""
    offset = cursor.offset
    key = cursor.u32("flags") >> 2 & 7
    if key >= len(SIGNING_KEYS):
        raise malformed(EVIDENCE, field, offset, wanted="0 (VCEK) or 1 (VLEK)", found=key)
    return SIGNING_KEYS[key]


def _read_product(cursor: Cursor) -> SnpProduct:
    offset = cursor.offset
    family, model = cursor.u8("CPUID_FAM_ID"), cursor.u8("CPUID_MOD_ID")
    cursor.u8("CPUID_STEP")
    if family == 0x19 and model < 0x10:
        return SnpProduct.MILAN
    if family == 0x19 and model >> 4 in {0x1, 0xA}:
        return SnpProduct.GENOA
    if family == 0x1A and model < 0x12:
        return SnpProduct.TURIN
    cpu = f"family {family:#x}, model {model:#x}"
    raise malformed(EVIDENCE, "CPUID_FAM_ID", offset, wanted="a CPU of Milan, Genoa or Turin", found=cpu)


def _read_version(cursor: Cursor, field: str) -> tuple[int, int, int]:
    build, minor, major = (cursor.u8(f"{field}_{part}") for part in ("BUILD", "MINOR", "MAJOR"))
    cursor.take(1, "reserved")
    return major, minor, build


def _read_signature(cursor: Cursor) -> bytes:
    """Read r and s: 72 bytes each, 48 used by P-384."""
    r = cursor.take(48, "SIGNATURE.R")
    cursor.zeros(24, "SIGNATURE.R")
    s = cursor.take(48, "SIGNATURE.S")
    cursor.zeros(24, "SIGNATURE.S")
    cursor.zeros(368, "reserved part of SIGNATURE")
    return r + s


_BEGINNING: Layout = (
    ("guest_svn", "GUEST_SVN", Cursor.u32),
    ("policy", "POLICY", Cursor.u64),
    ("family_id", "FAMILY_ID", 16),
    ("image_id", "IMAGE_ID", 16),
    ("vmpl", "VMPL", Cursor.u32),
    ("", "SIGNATURE_ALGO", lambda cursor, field: cursor.expect(_ECDSA_P384.to_bytes(4, "little"), field)),
    ("current_tcb", "CURRENT_TCB", 8),
    ("platform_info", "PLATFORM_INFO", Cursor.u64),
    ("signing_key", "SIGNING_KEY", _read_signing_key),
    ("", "reserved", 4),
    ("report_data", "REPORT_DATA", 64),
    ("measurement", "MEASUREMENT", 48),
    ("host_data", "HOST_DATA", 32),
    ("id_key_digest", "ID_KEY_DIGEST", 48),
    ("author_key_digest", "AUTHOR_KEY_DIGEST", 48),
    ("report_id", "REPORT_ID", 32),
    ("report_id_ma", "REPORT_ID_MA", 32),
    ("reported_tcb", "REPORTED_TCB", 8),
)
_PLATFORM: Layout = (
    ("chip_id", "CHIP_ID", 64),
    ("committed_tcb", "COMMITTED_TCB", 8),
    ("current_version", "CURRENT", _read_version),
    ("committed_version", "COMMITTED", _read_version),
    ("launch_tcb", "LAUNCH_TCB", 8),
)
