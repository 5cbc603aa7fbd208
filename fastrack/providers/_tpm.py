"""Keys sealed by a TPM 2.0, perhaps to the state of a machine."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Self

from fastrack._keys.wrapped import KeyWrapper, WrappedKey, import_client, require_algorithm, require_parameters
from fastrack._util.shown import shown
from fastrack.errors import FormatError, ProviderError

TCTI_VARIABLE = "TPM2TOOLS_TCTI"

_ALGORITHM = "TPM2-SEALED"
_BANK = r"sha(?:256|384|512):(?:[0-9]|1[0-9]|2[0-3])(?:,(?:[0-9]|1[0-9]|2[0-3]))*"
_PCRS = re.compile(rf"{_BANK}(?:\+{_BANK})*")
_STORAGE_KEY = "ecc256:aes128cfb"
_SESSION_CIPHER = "aes128cfb"
_RESOURCE_MANAGER = 11  # the layer that a resource manager adds to codes of the TPM
_BAD_PASSWORD = (0xA2, 0x8E)  # TPM_RC_BAD_AUTH, TPM_RC_AUTH_FAIL; an owner's counts towards no lockout


class Tpm(KeyWrapper):
    """A TPM 2.0, with the client tpm2-pytss. The key opens only on this TPM, and on request only in a certain state.

    The key is a sealed object below a storage key of the owner hierarchy, which the TPM derives again each time (ECC
    P-256, with an empty owner password). It travels between process and TPM encrypted to the storage key. A cleared or
    different TPM does not open it.

    Parameters
    ----------
    pcrs : str
        The platform configuration registers that must keep their current values, such as ``sha256:0,7``. By default
        none.
    tcti : str, optional
        The way to the TPM, such as ``device:/dev/tpmrm0``. By default the value of ``TPM2TOOLS_TCTI``, else the
        first TPM of the machine.

    Raises
    ------
    ValueError
        If `pcrs` has another form.

    Examples
    --------
    >>> from fastrack.providers import Tpm
    >>> Tpm(pcrs="sha256:7")
    <Tpm sha256:7>
    """

    provider: ClassVar[str] = "tpm"

    def __init__(self, *, pcrs: str = "", tcti: str | None = None) -> None:
        if pcrs and _PCRS.fullmatch(pcrs) is None:
            raise ValueError(
                f"expected PCRs of a bank SHA-256, SHA-384 or SHA-512, such as sha256:0,7, got {shown(pcrs)}"
            )
        self._pcrs = pcrs
        self._tcti = tcti

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """Make a wrapper from ``tpm:`` or ``tpm:PCRS``."""
        return cls(pcrs=uri.removeprefix(f"{cls.provider}:"))

    @classmethod
    def from_wrapped(cls, wrapped: WrappedKey) -> Self:
        """Make a wrapper from the parameters of a file and the environment."""
        _read_parameters(wrapped)
        return cls()

    def _encrypt(self, secret: memoryview, key_id: str) -> tuple[str, bytes, dict[str, str]]:
        tss = import_client("tpm2_pytss", "tpm")
        with self._open(tss) as tpm, _storage_key(tss, tpm) as parent:
            name = bytes(tpm.tr_get_name(parent))
            attributes = tss.TPMA_OBJECT.FIXEDTPM | tss.TPMA_OBJECT.FIXEDPARENT | tss.TPMA_OBJECT.NODA
            policy = b""
            if self._pcrs:
                with _session(tss, tpm, parent, tss.TPM2_SE.TRIAL) as trial:
                    tpm.policy_pcr(trial, None, self._pcrs)
                    policy = bytes(tpm.policy_get_digest(trial))
            else:
                attributes |= tss.TPMA_OBJECT.USERWITHAUTH
            template = tss.TPM2B_PUBLIC(
                tss.TPMT_PUBLIC.parse("keyedhash", objectAttributes=attributes, authPolicy=policy)
            )
            sensitive = tss.TPM2B_SENSITIVE_CREATE(tss.TPMS_SENSITIVE_CREATE(data=bytes(secret)))
            try:
                with _session(tss, tpm, parent, tss.TPM2_SE.HMAC) as session:
                    private, public, *_ = tpm.create(parent, sensitive, template, session1=session)
            finally:
                _wipe(sensitive.sensitive.data.buffer)
        parameters = {"parent": name.hex(), **({"pcrs": self._pcrs} if self._pcrs else {})}
        return _ALGORITHM, public.marshal() + private.marshal(), parameters

    def _decrypt(self, wrapped: WrappedKey) -> bytes | bytearray:
        parent_name, pcrs = _read_parameters(wrapped)
        tss = import_client("tpm2_pytss", "tpm")
        try:
            public, size = tss.TPM2B_PUBLIC.unmarshal(wrapped.ciphertext)
            private, rest = tss.TPM2B_PRIVATE.unmarshal(wrapped.ciphertext[size:])
        except tss.TSS2_Exception:
            size = rest = 0
        if not rest or size + rest != len(wrapped.ciphertext):
            raise FormatError(
                f"the wrapped file of key {wrapped.key_id} is wrong: expected a sealed object of a TPM; restore it"
            )
        with self._open(tss) as tpm, _storage_key(tss, tpm) as parent:
            if bytes(tpm.tr_get_name(parent)) != parent_name:
                raise ProviderError(
                    f"unwrapping key {wrapped.key_id} failed: expected the TPM that wrapped it, got another, or the "
                    "same after it was cleared. Wrap the key again on this machine"
                )
            handle = tpm.load(parent, private, public)
            with _flushed(tpm, handle):
                kind = tss.TPM2_SE.POLICY if pcrs else tss.TPM2_SE.HMAC
                with _session(tss, tpm, parent, kind) as session:
                    if pcrs:
                        tpm.policy_pcr(session, None, pcrs)
                    opened = tpm.unseal(handle, session1=session)
            secret = bytearray(opened.buffer)
            _wipe(opened.buffer)
            return secret

    @contextlib.contextmanager
    def _open(self, tss: Any) -> Iterator[Any]:
        tcti = self._tcti or os.environ.get(TCTI_VARIABLE) or None
        try:
            os.environ.setdefault("TSS2_LOG", "all+NONE")  # or the library writes its log to stderr; it is read once
            with tss.ESAPI(tcti) as tpm:
                yield tpm
        except tss.TSS2_Exception as error:
            raise self._failure(_explain(error), refusal=error.error in _BAD_PASSWORD) from None

    def __repr__(self) -> str:
        return f"<Tpm {self._pcrs or 'without PCRs'}>"


def _read_parameters(wrapped: WrappedKey) -> tuple[bytes, str]:
    require_algorithm(wrapped, _ALGORITHM)
    parameters = require_parameters(wrapped, frozenset({"parent"}), frozenset({"pcrs"}))
    pcrs = parameters.get("pcrs", "")
    if re.fullmatch(r"(?:[0-9a-f]{2}){34}", parameters["parent"]) is None or (pcrs and _PCRS.fullmatch(pcrs) is None):
        raise FormatError(
            f"the wrapped file of key {wrapped.key_id} is wrong: expected the name of a storage key, and PCRs such as "
            "sha256:0,7; restore it"
        )
    return bytes.fromhex(parameters["parent"]), pcrs


@contextlib.contextmanager
def _storage_key(tss: Any, tpm: Any) -> Iterator[Any]:
    """Yield the handle of the storage key, which the TPM derives from its seed and the template."""
    attribute = tss.TPMA_OBJECT
    attributes = attribute.RESTRICTED | attribute.DECRYPT | attribute.NODA | attribute.USERWITHAUTH
    attributes |= attribute.FIXEDTPM | attribute.FIXEDPARENT | attribute.SENSITIVEDATAORIGIN
    template = tss.TPM2B_PUBLIC(tss.TPMT_PUBLIC.parse(_STORAGE_KEY, objectAttributes=attributes))
    handle, *_ = tpm.create_primary(None, template, primary_handle=tss.ESYS_TR.OWNER)
    with _flushed(tpm, handle):
        yield handle


@contextlib.contextmanager
def _session(tss: Any, tpm: Any, salt_key: Any, kind: Any) -> Iterator[Any]:
    """Yield a session that encrypts the first parameter in each direction; its secret is encrypted to `salt_key`."""
    cipher = tss.TPMT_SYM_DEF.parse(_SESSION_CIPHER)
    handle = tpm.start_auth_session(salt_key, tss.ESYS_TR.NONE, kind, cipher, tss.TPM2_ALG.SHA256)
    with _flushed(tpm, handle):
        attribute = tss.TPMA_SESSION
        tpm.trsess_set_attributes(handle, attribute.DECRYPT | attribute.ENCRYPT | attribute.CONTINUESESSION)
        yield handle


@contextlib.contextmanager
def _flushed(tpm: Any, handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        tpm.flush_context(handle)


def _wipe(view: memoryview) -> None:
    view[:] = bytes(len(view))


def _explain(error: Any) -> str:
    code = f"0x{error.rc & 0xFFFFFFFF:x}"
    reasons = {
        0x9D: "the policy does not hold: a PCR has another value than when the key was wrapped",  # TPM_RC_POLICY_FAIL
        0x9F: "the file was altered, or is of another TPM; restore it from a copy",  # TPM_RC_INTEGRITY
        **dict.fromkeys(_BAD_PASSWORD, "the owner has a password; clear it, or use a PKCS#11 module for the TPM"),
    }
    if (error.rc >> 16) & 0xFF in {0, _RESOURCE_MANAGER}:  # the TPM itself answered
        return f"code {code}, {reasons.get(error.error, 'look it up with `tpm2_rc_decode`')}"
    return f"code {code}, no TPM could be reached. Set {TCTI_VARIABLE}, such as device:/dev/tpmrm0, check its rights"
