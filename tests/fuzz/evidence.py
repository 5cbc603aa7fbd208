"""Evidence of confidential machines: anything at all is either what was signed, or refused with a documented error.

The parts of a case stand one after the other, each behind its length; so a mutation may reach any of them.
"""

import contextlib
from dataclasses import MISSING, fields
from functools import cache, partial
from itertools import count
from random import Random
from unittest import mock

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from helpers.foundry import authority, event_logs, nvidia, snp, tdx
from helpers.foundry.authority import NOW

from fastrack import AttestationError, FormatError, attest
from fuzz import mutators
from fuzz.common import attempt, require

ERRORS = (AttestationError, FormatError)
NAMES = [field.name for field in fields(attest.TdxCollateral) if field.default is MISSING]


@contextlib.contextmanager
def same_every_time():
    """Let the foundry use keys, serial numbers and salts that are the same in every run."""
    chance = Random(1)

    def new_key(curve=ec.SECP256R1):
        return ec.derive_private_key(chance.getrandbits(250), curve())

    short = padding.PSS(padding.MGF1(hashes.SHA384()), 0)  # its salt
    patched = mock.patch.multiple(authority, new_key=new_key, rsa_key=lambda _: rsa_key(), PSS=short)
    with patched, mock.patch("os.urandom", chance.randbytes):
        yield


@cache
def rsa_key():
    """Make an RSA key that is the same in every run, which pyca by itself does not."""
    chance, exponent = Random(2), 65537
    p, q = (next(filter(is_prime, count(chance.getrandbits(1024) | 3 << 1022 | 1, 2))) for _ in range(2))
    d = pow(exponent, -1, (p - 1) * (q - 1))
    parts = (p, q, d, rsa.rsa_crt_dmp1(d, p), rsa.rsa_crt_dmq1(d, q), rsa.rsa_crt_iqmp(p, q))
    return rsa.RSAPrivateNumbers(*parts, rsa.RSAPublicNumbers(exponent, p * q)).private_key()


def is_prime(number):
    return all(pow(base, number - 1, number) == 1 for base in (2, 3, 5, 7))


def pack(parts):
    """Write parts one after the other, each behind its length."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def unpack(data, count):
    """Read `count` parts; the last may be cut short, and those that are missing are empty."""
    parts = []
    for _ in range(count):
        size = int.from_bytes(data[:4], "little")
        parts.append(data[4 : 4 + size])
        data = data[4 + size :]
    return parts


def mutate_parts(count):
    """Return a method that alters one of so many parts."""

    def mutate(data, random):
        parts = unpack(data, count)
        if random.random() < 0.05:
            return mutators.mutate_bytes(data, random)
        place = random.randrange(count)
        parts[place] = mutators.mutate_any(parts[place], random)
        return pack(parts)

    return staticmethod(mutate)


def require_known(verify, known):
    """Require that what verifies, by the error that it raises otherwise, is something that was signed."""
    found = attempt(verify, *ERRORS)
    require(found is None or known(found), "something was verified that nothing signed")


class TdxQuotes:
    """`verify_tdx_quote`, of a quote and the nine parts of its collateral."""

    name = "tdx"
    mutate = mutate_parts(1 + len(NAMES))

    def __init__(self):
        with same_every_time():
            of = tdx.intel.__wrapped__()
            machine, collateral = tdx.platform(of=of), tdx.collateral(of=of)
            self._quotes = [tdx.quote(machine, version=version, body_type=kind) for version, kind in ((4, 2), (5, 3))]
        self._parts = [collateral[name] for name in NAMES]
        self._roots = of.roots

    def seeds(self):
        return [pack([quote, *self._parts]) for quote in self._quotes]

    def run(self, data):
        quote, *parts = unpack(data, 1 + len(NAMES))
        collateral = attest.TdxCollateral(*parts)
        known = [attest.parse_tdx_quote(one).report for one in self._quotes]
        require_known(
            lambda: attest.verify_tdx_quote(quote, collateral, now=NOW, roots=self._roots),
            lambda verified: verified.report in known,
        )


class SnpReports:
    """`verify_snp_report`, of a report, its certificates and a revocation list."""

    name = "snp"
    mutate = mutate_parts(4)

    def __init__(self):
        self._seeds, self._reports, self._roots = [], [], set()
        with same_every_time():
            for product, is_vlek in (("Milan", False), ("Turin", True)):
                of = snp.amd.__wrapped__(product)
                chip = snp.chip(product, of=of, is_vlek=is_vlek)
                report = snp.report(chip)
                self._seeds.append(pack([report, chip.leaf, chip.issuers, of.ark.crl()]))
                self._reports.append(report)
                self._roots |= of.roots

    def seeds(self):
        return self._seeds

    def run(self, data):
        report, leaf, issuers, crl = unpack(data, 4)
        require_known(
            lambda: attest.verify_snp_report(report, leaf, issuers, now=NOW, roots=self._roots, crl=crl or None),
            lambda verified: verified.report.data in self._reports,
        )


class EventLogs:
    """`EventLog.parse`."""

    name = "event log"
    mutate = staticmethod(mutators.mutate_any)

    def seeds(self):
        return [event_logs.ccel(), event_logs.dstack(), event_logs.dstack(2)]

    def run(self, data):
        log = attempt(lambda: attest.EventLog.parse(data), FormatError)
        known = {one.rtmrs: digests(one) for one in map(attest.EventLog.parse, self.seeds())}
        require(log is None or known.get(log.rtmrs, digests(log)) == digests(log), "two logs give the same registers")


def digests(log):
    return [[event.digest for event in log.of(register)] for register in range(4)]


class Policies:
    """`Policy.from_toml`."""

    name = "policy"
    mutate = staticmethod(mutators.mutate_bytes)

    def seeds(self):
        return [
            b"version = 1\n[cpu.tdx]\nmrtd = 'any'\nrtmr1 = 'any'\nrtmr2 = 'any'\nmax_collateral_age_days = 3\n",
            b"version = 1\n[cpu.tdx]\nmrtd = 'any'\nrtmr1 = 'any'\nrtmr2 = 'any'\nxfam = ['e702060000000000']\n",
            b"version = 1\n[cpu.snp]\nmeasurement = 'any'\nmin_tcb = { snp = 3 }\nrevocation = 'required'\n",
            b"version = 1\n[cpu.tdx]\nmrtd = 'any'\nrtmr1 = 'any'\n[[cpu.tdx.events.rtmr2]]\ntexts = ['quiet']\n",
            b"version = 1\n[gpu]\ncount = 8\nrequire_manifests = true\nmodes = ['PPCIE']\nswitch_count = 4\n",
        ]

    def run(self, data):
        policy = attempt(lambda: attest.Policy.from_toml(data.decode(errors="replace")), FormatError)
        require(policy is None or isinstance(policy, attest.Policy), f"a policy is {policy!r}")


class GpuReports:
    """`verify_gpu_report`, of a report, its certificates and an OCSP response for each authority."""

    name = "gpu"
    mutate = mutate_parts(5)

    def __init__(self):
        self._seeds, self._reports = [], []
        with same_every_time():
            root = nvidia.device_root.__wrapped__()
            for part in ("GH100", "GB100", "LS_10"):
                device = nvidia.device(part, root=root)
                fields = nvidia.switch_fields() if part == "LS_10" else nvidia.gpu_fields()
                report = nvidia.report(device, fields=fields, measurements=nvidia.MEASUREMENTS[:8])
                self._seeds.append(pack([report, device.pem, *nvidia.statuses(device.chain[1:])]))
                self._reports.append(report)
        self._roots = device.roots

    def seeds(self):
        return self._seeds

    def run(self, data):
        report, chain, *responses = unpack(data, 5)
        options = {"now": NOW, "roots": self._roots, "ocsp": responses if any(responses) else None}
        verify = partial(attest.verify_gpu_report, report, chain, nonce=nvidia.NONCE, **options)
        require_known(verify, lambda _: report in self._reports)


class Rims:
    """`parse_rim` and `verify_rim`."""

    name = "rim"
    mutate = staticmethod(mutators.mutate_bytes)

    def __init__(self):
        with same_every_time():
            signer = nvidia.rim_signer.__wrapped__()
            few = [nvidia.resource(number, [bytes(48)] * (1 + number % 3)) for number in range(4)]
            self._seeds = [nvidia.rim(few, signer=signer), nvidia.rim(few, signer=signer, version="96.00", product="X")]
        self._roots = signer.roots
        self._known = [attest.parse_rim(data).measurements for data in self._seeds]

    def seeds(self):
        return self._seeds

    def run(self, data):
        attempt(lambda: attest.parse_rim(data), FormatError)
        require_known(
            lambda: attest.verify_rim(data, now=NOW, roots=self._roots),
            lambda verified: verified.rim.measurements in self._known,
        )


class OcspResponses:
    """`verify_ocsp_response`, of responses by the issuer and by a delegated responder."""

    name = "ocsp"
    mutate = staticmethod(mutators.mutate_bytes)

    def __init__(self):
        with same_every_time():
            self._issuer = authority.Authority("Issuer")
            self._leaf = authority.Authority("Leaf", self._issuer, ca=False)
            by = nvidia.responder(self._issuer)
            pair = (self._leaf, self._issuer)
            self._good = [nvidia.status(*pair), nvidia.status(*pair, by=by, nonce=b"n" * 16)]
            self._bad = [nvidia.status(*pair, good=False), nvidia.status(*pair, unknown=True, by=by, by_name=True)]

    def seeds(self):
        return [*self._good, *self._bad]

    def run(self, data):
        pair = (self._leaf.certificate, self._issuer.certificate)
        require_known(lambda: attest.verify_ocsp_response(data, *pair, now=NOW), lambda _: data in self._good)
