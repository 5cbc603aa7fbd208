"""Certificates and revocation lists: a root, authorities below it, and leaves, of ECDSA or RSASSA-PSS keys."""

import os
from datetime import datetime, timedelta
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from fastrack import AttestationError, FormatError

NOW = datetime.fromisoformat(os.environ.get("FASTRACK_TEST_NOW", "2026-06-01T12:00:00+00:00"))
LONG = timedelta(days=3650)
PSS = padding.PSS(padding.MGF1(hashes.SHA384()), hashes.SHA384.digest_size)


def new_key(curve=ec.SECP256R1):
    """Make an ECDSA key. All keys of the foundry come from here and from `rsa_key`, where fuzzing puts its own."""
    return ec.generate_private_key(curve())


@cache
def rsa_key(_name):
    """Make an RSA key, once for each name, as that takes a while. Smaller than AMD's, for the same reason."""
    return rsa.generate_private_key(65537, 2048)


class Authority:
    """A certificate with its private key, which may sign certificates and lists.

    Parameters
    ----------
    name : str or x509.Name
        The common name of the subject.
    issuer : Authority, optional
        Itself by default.
    key : private key, optional
        P-256 by default; an RSA key signs with RSASSA-PSS.
    """

    def __init__(
        self,
        name,
        issuer=None,
        *,
        key=None,
        ca=True,
        path_length=None,
        start=NOW - LONG,
        end=NOW + LONG,
        usage="default",
        basic=True,
        serial=None,
        extensions=(),
        critical=(),
        claimed_issuer=None,
        hash_algorithm=None,
        pss=None,
    ):
        self.key = key or new_key()
        self.subject = name if isinstance(name, x509.Name) else named(name)
        signer = issuer or self
        builder = (
            x509.CertificateBuilder()
            .subject_name(self.subject)
            .issuer_name(claimed_issuer or signer.subject)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number() if serial is None else serial)
            .not_valid_before(start)
            .not_valid_after(end)
        )
        if basic:
            builder = builder.add_extension(x509.BasicConstraints(ca, path_length if ca else None), critical=True)
        if usage == "default":
            usage = key_usage("key_cert_sign", "crl_sign") if ca else key_usage("digital_signature")
        if usage is not None:
            builder = builder.add_extension(usage, critical=True)
        for oid, value in extensions:
            unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value)
            builder = builder.add_extension(unknown, critical=oid in critical)
        algorithm = hash_algorithm or signer.hash()
        options = signing_options(signer.key, pss)
        self.certificate = builder.sign(signer.key, algorithm, **options)

    def hash(self):
        """Return the hash that goes with the key."""
        if isinstance(self.key, ec.EllipticCurvePrivateKey) and self.key.curve.name == "secp256r1":
            return hashes.SHA256()
        return hashes.SHA384()

    @property
    def der(self):
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def pem(self):
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def fingerprint(self):
        return self.certificate.fingerprint(hashes.SHA256()).hex()

    def crl(
        self,
        revoked=(),
        *,
        start=NOW - timedelta(days=1),
        end=NOW + timedelta(days=30),
        name=None,
        critical=False,
        extensions=(),
        number=7,
    ):
        """Make a list of revoked certificates, in DER. `extensions` are not marked critical."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(name or self.subject)
            .last_update(start)
            .next_update(end)
        )
        if number is not None:
            builder = builder.add_extension(x509.CRLNumber(number), critical=False)
        if critical:
            builder = builder.add_extension(x509.DeltaCRLIndicator(3), critical=True)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        for authority in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(authority.certificate.serial_number)
            builder = builder.add_revoked_certificate(entry.revocation_date(start).build())
        return builder.sign(self.key, self.hash(), **signing_options(self.key)).public_bytes(Encoding.DER)


def signing_options(key, pss=None):
    """Sign in the way of the key, and always the same."""
    return {"rsa_padding": pss or PSS} if isinstance(key, rsa.RSAPrivateKey) else {"ecdsa_deterministic": True}


def named(common_name):
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Foundry"),
        ]
    )


def key_usage(*names):
    """Make a key usage with these bits set."""
    known = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: name in names for name in known})


def bundle(*authorities):
    """Write certificates in PEM, one after the other."""
    return b"".join(authority.pem for authority in authorities)


def flips(data, *, mask=0x01, step=1):
    """Yield copies of `data`, in each of which one byte is changed, and its index."""
    for index in range(0, len(data), step):
        yield index, data[:index] + bytes([data[index] ^ mask]) + data[index + 1 :]


def is_refused(action, *arguments):
    """Return whether an action raises one of the two errors that evidence may raise."""
    try:
        action(*arguments)
    except (AttestationError, FormatError):
        return True
    return False
