"""Reports of SEV-SNP, versions 2 to 5, with the certificates of a made-up AMD."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from helpers.foundry import authority
from helpers.foundry.authority import Authority, bundle, key_usage
from helpers.foundry.tdx import element, integer, number, raw_signature

PRODUCTS = {"Milan": (0x19, 0x01), "Genoa": (0x19, 0x11), "Turin": (0x1A, 0x02)}
TCB = {"bootloader": 3, "tee": 0, "snp": 8, "microcode": 115, "fmc": 2}
CHIP_ID = bytes(range(1, 65))
OID = "1.3.6.1.4.1.3704.1"


@dataclass
class Amd:
    """The authorities of one product: its root, and those that issue VCEKs and VLEKs."""

    ark: Authority
    ask: Authority
    asvk: Authority

    @property
    def roots(self):
        return frozenset({self.ark.fingerprint})


@cache
def amd(product):
    """Make the authorities of a product, once."""
    ark = Authority(f"ARK-{product}", key=authority.rsa_key(f"ARK {product}"))
    usage = key_usage("key_cert_sign")
    ask = Authority(f"SEV-{product}", ark, key=authority.rsa_key(f"ASK {product}"), path_length=0, usage=usage)
    return Amd(
        ark,
        ask,
        Authority(f"SEV-VLEK-{product}", ark, key=authority.rsa_key(f"ASVK {product}"), path_length=0, usage=usage),
    )


@dataclass
class Chip:
    """A chip, or a provider's share of it: its certificate, the issuers, and what belongs in its reports."""

    product: str
    key: ec.EllipticCurvePrivateKey
    leaf: bytes
    issuers: bytes
    chip_id: bytes
    is_vlek: bool


def chip(
    product="Milan",
    *,
    of=None,
    is_vlek=False,
    tcb=None,
    chip_id=None,
    issuer=None,
    key=None,
    leave_out=(),
    replaced=None,
    wrapped=False,
    provider="Cloud",
    **options,
):
    """Make a chip with its certificate. Like AMD's, it has neither constraints nor usage, and the serial number 0."""
    of = of or amd(product)
    issuer = issuer or (of.asvk if is_vlek else of.ask)
    tcb = TCB | (tcb or {})
    chip_id = chip_id or (CHIP_ID[:8] if product == "Turin" else CHIP_ID)
    members = {
        "1": integer(0),
        "2": element(0x16, f"{product}-B0".encode()),
        "3.1": integer(tcb["bootloader"]),
        "3.2": integer(tcb["tee"]),
        "3.3": integer(tcb["snp"]),
        "3.8": integer(tcb["microcode"]),
    }
    if product == "Turin":
        members["3.9"] = integer(tcb["fmc"])
    if is_vlek:
        members["5"] = element(0x16, provider.encode())
    else:
        members["4"] = element(0x04, chip_id) if wrapped else chip_id
    members |= replaced or {}
    key = key or authority.new_key(ec.SECP384R1)
    leaf = Authority(
        options.pop("name", "SEV-VLEK" if is_vlek else "SEV-VCEK"),
        issuer,
        **{"key": key, "ca": False, "basic": False, "usage": None, "serial": 1} | options,
        extensions=[(f"{OID}.{name}", value) for name, value in members.items() if name not in leave_out],
    )
    return Chip(product, key, without_serial(leaf.certificate, issuer.key), bundle(issuer, of.ark), chip_id, is_vlek)


def without_serial(certificate, key):
    """Give a certificate the serial number 0, which pyca makes none with, and sign it again."""
    signed = certificate.tbs_certificate_bytes
    place = signed.index(b"\xa0\x03\x02\x01\x02\x02\x01\x01") + 7  # after the version: an INTEGER of one byte
    changed = signed[:place] + b"\0" + signed[place + 1 :]
    der = certificate.public_bytes(Encoding.DER)
    der = der.replace(signed, changed)
    return der.removesuffix(certificate.signature) + key.sign(changed, authority.PSS, hashes.SHA384())


def pack(product, tcb):
    """Pack the patch levels of a platform into 8 bytes."""
    tcb = TCB | (tcb or {})
    if product == "Turin":
        return bytes([tcb["fmc"], tcb["bootloader"], tcb["tee"], tcb["snp"], 0, 0, 0, tcb["microcode"]])
    return bytes([tcb["bootloader"], tcb["tee"], 0, 0, 0, 0, tcb["snp"], tcb["microcode"]])


def report(
    machine,
    *,
    version=3,
    policy=0x30000,
    vmpl=0,
    report_data=bytes(range(64)),
    measurement=b"\x22" * 48,
    host_data=b"\x33" * 32,
    platform_info=0x25,
    signing_key=None,
    algorithm=1,
    cpu=None,
    tcb=None,
    current_tcb=None,
    committed_tcb=None,
    launch_tcb=None,
    chip_id=None,
    key=None,
    tail=bytes(368),
):
    """Write and sign a report of 1184 bytes."""
    flags = (int(machine.is_vlek) if signing_key is None else signing_key) << 2
    family, model = cpu or PRODUCTS[machine.product]
    levels = pack(machine.product, tcb)
    current = pack(machine.product, {"microcode": 206} if current_tcb is None else current_tcb)
    signed = b"".join(
        [
            number(version, 4),
            number(4, 4),
            number(policy, 8),
            b"\1" * 16,
            b"\2" * 16,
            number(vmpl, 4),
            number(algorithm, 4),
            current,
            number(platform_info, 8),
            number(flags, 4),
            bytes(4),
            report_data,
            measurement,
            host_data,
            b"\x44" * 48,
            b"\x55" * 48,
            b"\x66" * 32,
            b"\xff" * 32,
            levels,
            (bytes([family, model, 1]) if version > 2 else bytes(3)) + bytes(21),
            (machine.chip_id if chip_id is None else chip_id).ljust(64, b"\0"),
            pack(machine.product, {**(tcb or {}), **(committed_tcb or {})}),
            bytes([4, 52, 1, 0, 3, 51, 1, 0]),
            pack(machine.product, {**(tcb or {}), **(launch_tcb or {})}),
            (number(5, 8) + number(7, 8) if version > 4 else bytes(16)) + bytes(152),
        ]
    )
    signature = raw_signature(key or machine.key, signed, size=48, algorithm=hashes.SHA384(), byteorder="little")
    return signed + signature[:48] + bytes(24) + signature[48:] + bytes(24) + tail
