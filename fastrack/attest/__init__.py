"""Verification of attestation evidence of confidential machines, offline.

Evidence, certificates, collateral and the time are all arguments of parsers and verifiers, which open no socket, read
no clock and ask no service; `fetch_collateral` asks the vendors' services, and `fetch_keys` a broker. Parsers return
untrusted values, such as `TdxQuote`; verifiers raise `fastrack.AttestationError`, or return proved claims as another
type, such as `VerifiedTdxQuote`. A `Policy` then judges these claims.

Parsers and verifiers raise `FormatError` for a malformed structure, with the field and its offset. Failed checks raise
`AttestationError`, with the evidence, the field, and the values wanted and found. All verifiers take `now`, the time
with a time zone (else a `ValueError`). Some take `roots`, the SHA-256 fingerprints of the trusted roots, by default the
vendor's; `ocsp`, OCSP responses in DER for all certificates but the root, without which revocation is not checked; and
`evidence`, a name for errors, such as "GPU 3 report". Verified values have `verified_at`, the time of verification, and
`valid_until`, the first time that a certificate or document expires. Some have `revocation_checked_at`, the time of the
oldest revocation list or OCSP response that was used, None if none was passed.

A public name is imported when it is first used.
"""

from fastrack._util.public import lazy

__getattr__, __dir__ = lazy(globals())
