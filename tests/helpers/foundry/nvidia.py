"""Reports of GPUs and switches, reference manifests and OCSP responses, by a made-up NVIDIA."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import sha384
from itertools import pairwise

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import ocsp
from cryptography.x509.oid import NameOID

from helpers.foundry import authority
from helpers.foundry.authority import NOW, Authority, bundle

DAY = timedelta(days=1)
NONCE = bytes(range(32))
FWID = b"\xf1" * 48
COMPOSITE, TCB_INFO = "2.23.133.5.4.1", "2.23.133.5.4.1.1"
MEASUREMENTS = tuple(bytes([number]) * 48 for number in range(64))
VBIOS = bytes.fromhex("0074009620000000")  # 96.00.74.00.20
DRIVER, VBIOS_TEXT, SWITCH_BIOS = "580.159.03", "96.00.74.00.20", "96.10.55.00.01"
SWITCH_PDI = bytes.fromhex("203eb31ad9ed0008")
SWID = "http://standards.iso.org/iso/19770/-2/2015/schema.xsd"
DSIG = "http://www.w3.org/2000/09/xmldsig#"
C14N = "http://www.w3.org/2006/12/xml-c14n11"


def new_key():
    return authority.new_key(ec.SECP384R1)


def sign(key, data):
    """Sign as devices and manifests do: r and s, 48 bytes each."""
    numbers = decode_dss_signature(key.sign(data, ec.ECDSA(hashes.SHA384(), deterministic_signing=True)))
    return b"".join(number.to_bytes(48, "big") for number in numbers)


def device_name(common_name, serial=None):
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if serial is not None:
        attributes.append(x509.NameAttribute(NameOID.SERIAL_NUMBER, serial))
    return x509.Name(attributes)


# DER, as far as the extensions need it.


def der(tag, *parts):
    content = b"".join(parts)
    size = len(content).to_bytes((len(content).bit_length() + 7) // 8 or 1, "big")
    return bytes([tag]) + (size if len(content) < 0x80 else bytes([0x80 | len(size)]) + size) + content


SHA384_OID = bytes.fromhex("0609608648016503040202")


def fwid(digest=FWID, oid=SHA384_OID):
    return der(0x30, oid, der(0x04, digest))


def composite(device, digest=FWID, version=1, key=None):
    spki = (key or device.key).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return der(0x30, der(0x02, bytes([version])), spki, fwid(digest))


def tcb_info(digest=FWID, *, fwids=None):
    fwids = fwid(digest) + fwid(bytes(48)) if fwids is None else fwids
    return der(
        0x30, der(0x80, b"NVIDIA"), der(0x81, b"GB100 A01 GSP"), der(0x84, b"\0"), der(0xA6, fwids), der(0x89, b"\0")
    )


@dataclass
class Device:
    """A GPU or switch: its certificates, leaf first, of which the first one's key signs."""

    chain: tuple[Authority, ...]

    @property
    def leaf(self):
        return self.chain[0]

    @property
    def pem(self):
        return bundle(*self.chain)

    @property
    def roots(self):
        return frozenset({self.chain[-1].fingerprint})


@cache
def device_root():
    return Authority("NVIDIA Device Identity CA", key=new_key())


def device(
    part="GH100", *, provisioner=None, leaf=None, serial="41E23D711E1C4FBFAC", extension="default", root=None, **options
):
    """Make a device of a part such as GH100, GB100 or LS_10."""
    root = root or device_root()
    identity = Authority(f"NVIDIA {part[:5]} Identity", root, key=new_key())
    ica = Authority(provisioner or f"NVIDIA {part} Provisioner ICA 1", identity, key=new_key())
    rom = Authority(device_name(f"{part} A01 GSP BROM", serial), ica, key=new_key())
    if extension == "default":
        extension = (TCB_INFO, tcb_info()) if part.startswith("GB") else (COMPOSITE, composite(rom))
    signer = Authority(
        device_name(leaf or f"{part} A01 GSP FMC LF", "592CA9"),
        rom,
        **{"ca": False, "basic": False, "key": new_key(), "extensions": [extension] if extension else [], **options},
    )
    return Device((signer, rom, ica, identity, root))


@cache
def hopper():
    return device()


def sibling(of, number, kind=0x41):
    """Make another device of the same authorities, by its number or the 8 bytes of its id."""
    part = common_name(of.leaf).split(" ")[0]
    pdi = number if isinstance(number, bytes) else bytes.fromhex(f"e23d711e1c{number:06x}")
    serial = f"{kind:02X}{pdi.hex().upper()}"
    rom = Authority(device_name(f"{part} A01 GSP BROM", serial), of.chain[2], key=new_key())
    leaf = Authority(
        device_name(f"{part} A01 GSP FMC LF", "592CA9"),
        rom,
        ca=False,
        key=new_key(),
        extensions=[(COMPOSITE, composite(rom))],
    )
    return Device((leaf, rom, *of.chain[2:]))


def common_name(authority_):
    return authority_.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value


@cache
def blackwell():
    return device("GB100")


@cache
def switch():
    return device("LS_10", serial="50203EB31AD9ED0008")


# Reports.


def gpu_fields(**changes):
    """Make the opaque data of a GPU, by the names that `report` takes. None leaves one out."""
    fields = {
        "vbios": (6, VBIOS),
        "board": (14, b"\xa1\4\0\0"),
        "chip_sku": (15, b"862\0\0\0\0\0\0"),
        "project": (17, b"1010\0"),
        "project_sku": (18, b"0205\0"),
        "driver": (3, DRIVER.encode() + b"\0"),
        "counts": (12, bytes(256)),
        "nvdec": (11, b"\x55"),
        "fwid": (20, FWID),
        "pcie": (21, b"\x55"),
        "version": (34, b"\1\0"),
        "feature": (36, b"\0\0"),
    }
    for name, value in changes.items():
        number = {"chip": 35, "switches": 22}.get(name) or fields[name][0]
        fields[name] = (number, value)
    return [(number, value) for number, value in fields.values() if value is not None]


def switch_fields(bios=b"96.10.55.00.01", pdi=SWITCH_PDI, gpus=(), lock=b"\1\0"):
    """Make the opaque data of a switch. `gpus` are the ids of the GPUs that it is linked to."""
    linked = b"".join(gpus).ljust(64, b"\0") + b"\xff" * 64
    fields = [(6, bios), (22, pdi), (12, bytes(104)), (23, b"\xec\0"), (24, b"\2\0"), (25, lock), (26, linked)]
    return [(number, value) for number, value in fields if value is not None]


def protected(gpu_count=8, switch_count=4):
    """Make the GPUs and switches of a machine in protected PCIe mode: pairs of devices and the fields that they have.

    As in real machines, the reports of GPUs have the ids of switches with their bytes reversed.
    """
    gpu_ids = [bytes.fromhex(f"e23d711e1c{number:06x}") for number in range(gpu_count)]
    switch_ids = [bytes.fromhex(f"203eb31ad9ed{number:04x}") for number in range(switch_count)]
    links = b"".join(one[::-1] for one in switch_ids for _ in range(2)).ljust(144, b"\0")
    of = {"GH100": hopper(), "LS_10": switch()}
    machine = [
        (sibling(of["GH100"], one, 0x41), gpu_fields(pcie=b"\xaa", feature=b"\2\0", switches=links)) for one in gpu_ids
    ]
    return machine + [(sibling(of["LS_10"], one, 0x50), switch_fields(pdi=one, gpus=gpu_ids)) for one in switch_ids]


def opaque(fields):
    return b"".join(le(number) + le(len(value)) + value for number, value in fields)


def le(value, size=2):
    return value.to_bytes(size, "little")


def block(index, value, *, specification=1, kind=1):
    inner = bytes([kind]) + le(len(value)) + value
    return bytes([index, specification]) + le(len(inner)) + inner


def report(
    of,
    *,
    nonce=NONCE,
    measurements=MEASUREMENTS,
    fields=None,
    data=None,
    record=None,
    count=None,
    request=b"\x11\xe0\x01\xff",
    response=b"\x11\x60\0\0",
    key=None,
):
    """Make a signed report of a device."""
    if record is None:
        record = b"".join(block(number, value) for number, value in enumerate(measurements, 1))
    if data is None:
        data = opaque(gpu_fields() if fields is None else fields)
    signed = request + nonce + b"\0" + response + bytes([len(measurements) if count is None else count])
    signed += le(len(record), 3) + record + b"\x77" * 32 + le(len(data)) + data
    return signed + sign(key or of.leaf.key, signed)


# Reference manifests. Their text is made in canonical form, digested, and then written in a shorter one.


@dataclass
class Signer:
    """The certificates that a manifest is signed with, leaf first."""

    chain: tuple[Authority, ...]

    @property
    def roots(self):
        return frozenset({self.chain[-1].fingerprint})


@cache
def rim_signer():
    root = Authority("NVIDIA CoRIM signing Root CA", key=new_key())
    upper = Authority("NVIDIA Reference Value GH100 CA", root, key=new_key())
    lower = Authority("NVIDIA Reference Value L3 GH100 002", upper, key=new_key(), path_length=0)
    return Signer((Authority("HCC RIM L4 Signer", lower, key=new_key(), ca=False), lower, upper, root))


def resource(index, values, *, active=True, alternatives=None, name=None, size=48, kind="Measurement"):
    """Write a measurement in canonical form: attributes by namespace, then by name."""
    hashes_ = "".join(f' ns2:Hash{number}="{value.hex()}"' for number, value in enumerate(values))
    return (
        f'        <ns0:Resource active="{active}" alternatives="{alternatives or len(values)}" index="{index}" '
        f'name="{name or f"Measurement_{index}"}" size="{size}" type="{kind}"{hashes_}></ns0:Resource>\n'
    )


NAMESPACES = f'xmlns="{SWID}" xmlns:ns0="{SWID}" xmlns:ns2="http://www.w3.org/2001/04/xmlenc#sha384"'

SIGNATURE_NAMESPACES = NAMESPACES.replace(" xmlns:ns0", f' xmlns:ds="{DSIG}" xmlns:ns0')


def rim_text(
    resources,
    *,
    version=DRIVER,
    product="GH100",
    edition="GPU",
    supplemental="false",
    payload_type="direct",
    extra="",
    tag="SoftwareIdentity",
    tag_id="8aa5c875",
):
    """Write a manifest without its signature in canonical form, as the part before and after the signature's place."""
    before = (
        f'<{tag} {NAMESPACES} corpus="false" name="{product}" patch="false" supplemental="{supplemental}" '
        f'tagId="{tag_id}" tagVersion="0" version="1.0">\n'
        '    <ns0:Entity name="NVIDIA Corporation" role="softwareCreator tagCreator"></ns0:Entity>\n'
        '    <ns0:Meta xmlns:ns1="https://trustedcomputinggroup.org/rim/" '
        f'PayloadType="{payload_type}" colloquialVersion="{version}" edition="{edition}" product="{product}" '
        'revision="r1" ns1:BindingSpec="RIMIM"></ns0:Meta>\n'
        f'    <ns0:Payload xmlns:SHA384="http://www.w3.org/2001/04/xmlenc#sha384">\n{"".join(resources)}'
        f"    </ns0:Payload>\n{extra}"
    )
    return before, f"</{tag}>"


def signed_info(digest, *, c14n=C14N, uri="", transforms=None, reference="", method="ecdsa-sha384"):
    """Write SignedInfo in canonical form, without the namespaces of its root."""
    if transforms is None:
        transforms = (f"{DSIG}enveloped-signature", C14N)
    steps = "".join(f'<ds:Transform Algorithm="{name}"></ds:Transform>' for name in transforms)
    return (
        f'<ds:CanonicalizationMethod Algorithm="{c14n}"></ds:CanonicalizationMethod>'
        f'<ds:SignatureMethod Algorithm="http://www.w3.org/2001/04/xmldsig-more#{method}"></ds:SignatureMethod>'
        f'<ds:Reference URI="{uri}"><ds:Transforms>{steps}</ds:Transforms>'
        '<ds:DigestMethod Algorithm="http://www.w3.org/2001/04/xmldsig-more#sha384"></ds:DigestMethod>'
        f"<ds:DigestValue>{b64encode(digest).decode()}</ds:DigestValue></ds:Reference>{reference}</ds:SignedInfo>"
    )


def rim(resources=None, *, signer=None, key=None, digest=None, info=None, certificates=None, after="", **options):
    """Make a signed manifest, written in fewer characters than its canonical form has."""
    signer = signer or rim_signer()
    before, end = rim_text(driver_resources() if resources is None else resources, **options)
    digest = digest or sha384((before + after + end).encode()).digest()
    inner = signed_info(digest, **(info or {}))
    signature = sign(key or signer.chain[0].key, f"<ds:SignedInfo {SIGNATURE_NAMESPACES}>{inner}".encode())
    if certificates is None:
        certificates = [b64(one.der) for one in signer.chain]
    listed = "".join(f"<ds:X509Certificate>{one}</ds:X509Certificate>" for one in certificates)
    text = (
        f'{before}<ds:Signature xmlns:ds="{DSIG}"><ds:SignedInfo>{inner}'
        f"<ds:SignatureValue>{b64encode(signature).decode()}</ds:SignatureValue>"
        f"<ds:KeyInfo><ds:X509Data>{listed}</ds:X509Data></ds:KeyInfo></ds:Signature>{after}{end}\n"
    )
    return text.replace("></ns0:Resource>", "/>").replace("></ds:Transform>", "/>").encode()


def b64(data):
    """Write base64 in lines of 64 characters, as certificates have it."""
    text = b64encode(data).decode()
    return "".join(f"{text[start : start + 64]}\n" for start in range(0, len(text), 64))


def driver_resources(measurements=MEASUREMENTS):
    """Make the measurements of a driver: some active, one with alternatives, and the video decoder's at 35."""
    active = {7: [measurements[7]], 23: [bytes(48), measurements[23]], 35: [b"\xee" * 48]}
    return [resource(n, active.get(n, [bytes(48)]), active=n in active) for n in range(64)]


def vbios_rim(measurements=MEASUREMENTS, **options):
    resources = [resource(n, [measurements[n]], active=n in {0, 1, 2, 40}) for n in range(64)]
    return rim(resources, **{"version": VBIOS_TEXT, **options})


def switch_rim(measurements=MEASUREMENTS, **options):
    resources = [resource(n, [measurements[n]], active=n < 31) for n in range(64)]
    return rim(resources, **{"version": SWITCH_BIOS, "product": "LS10", "edition": "SWITCH", **options})


# OCSP.


def responder(issuer, *, usages=(x509.ExtendedKeyUsageOID.OCSP_SIGNING,), **options):
    """Make a certificate that may sign responses."""
    extension = x509.ExtendedKeyUsage(usages).public_bytes() if usages else None
    extensions = [(x509.ExtensionOID.EXTENDED_KEY_USAGE.dotted_string, extension)] if usages else []
    return Authority("OCSP Responder", issuer, **{"ca": False, "key": new_key(), "extensions": extensions, **options})


def status(
    about,
    issuer,
    *,
    by=None,
    good=True,
    unknown=False,
    start=NOW - DAY,
    end=NOW + DAY,
    nonce=None,
    by_name=False,
    sent=None,
    algorithm=None,
    certid=None,
    critical=False,
    change=None,
):
    """Make an OCSP response in DER about a certificate."""
    by = by or issuer
    revoked = not good and not unknown
    builder = (
        ocsp.OCSPResponseBuilder()
        .add_response(
            cert=about.certificate,
            issuer=issuer.certificate,
            algorithm=certid or hashes.SHA1(),
            cert_status=ocsp.OCSPCertStatus.UNKNOWN
            if unknown
            else ocsp.OCSPCertStatus.REVOKED
            if revoked
            else ocsp.OCSPCertStatus.GOOD,
            this_update=start,
            next_update=end,
            revocation_time=start if revoked else None,
            revocation_reason=x509.ReasonFlags.key_compromise if revoked else None,
        )
        .responder_id(ocsp.OCSPResponderEncoding.NAME if by_name else ocsp.OCSPResponderEncoding.HASH, by.certificate)
    )
    if by is not issuer and sent != ():
        builder = builder.certificates([one.certificate for one in sent or [by]])
    if nonce is not None:
        builder = builder.add_extension(x509.OCSPNonce(nonce), critical=critical)
    return sign_again(builder.sign(by.key, algorithm or by.hash()), by.key, change)


def sign_again(response, key, change=None):
    """Make a response that is the same every time, with the time at which it was produced set, signed by any key."""
    data, signed = response.public_bytes(Encoding.DER), response.tbs_response_bytes
    rest = data[data.index(signed) + len(signed) :]
    algorithm = rest[: 2 + rest[1]]
    certificates = [one.public_bytes(Encoding.DER) for one in response.certificates]
    produced = response.produced_at_utc.strftime("%Y%m%d%H%M%SZ").encode()
    signed = signed.replace(b"\x18\x0f" + produced, b"\x18\x0f" + NOW.strftime("%Y%m%d%H%M%SZ").encode(), 1)
    signed = change(signed) if change else signed
    if isinstance(key, ec.EllipticCurvePrivateKey):
        signature = key.sign(signed, ec.ECDSA(response.signature_hash_algorithm, deterministic_signing=True))
    else:
        signature = key.sign(signed, padding.PKCS1v15(), response.signature_hash_algorithm)
    parts = [signed, algorithm, der(0x03, b"\0", signature)]
    if certificates:
        parts.append(der(0xA0, der(0x30, *certificates)))
    basic = der(0x30, bytes.fromhex("06092b0601050507300101"), der(0x04, der(0x30, *parts)))
    return der(0x30, der(0x0A, b"\0"), der(0xA0, basic))


def with_statuses(signed, change):
    """Replace the statuses in response data, which come after the time at which it was produced, or what is in one."""
    start = signed.index(b"\x18\x0f" + NOW.strftime("%Y%m%d%H%M%SZ").encode()) + 17
    size = element_size(signed[start:])
    inside = signed[:start][header_size(signed) :]
    return der(0x30, inside, change(signed[start : start + size]), signed[start + size :])


def header_size(element):
    return 2 if element[1] < 0x80 else 2 + (element[1] & 0x7F)


def element_size(element):
    size = element[1] if element[1] < 0x80 else int.from_bytes(element[2 : header_size(element)], "big")
    return header_size(element) + size


def statuses(chain):
    """Make a good response for every certificate but the last."""
    return [status(one, issuer) for one, issuer in pairwise(chain)]
