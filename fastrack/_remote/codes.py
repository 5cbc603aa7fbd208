"""Explain refusals of stores by the code in the answer, which says more than its status."""

from __future__ import annotations

import builtins
import errno

from fastrack._net.retries import AGAIN, TransientError
from fastrack._remote.objects import codes_of
from fastrack._util.locations import Url

# What failed and what to do, by the number of the error and the codes: "List of error codes" of Amazon S3, "HTTP status
# and error codes" (XML, JSON) of Google's store, "Common REST API error codes" and "Blob Storage error codes" of Azure.
# Numbers answer without a body, as HEAD; names that end in Error are classes of Python and of the stores' packages.
_ANSWERS = {
    "the credentials have expired{}; get new ones": "EACCES ExpiredToken ExpiredTokenException TokenRefreshRequired "
    "InvalidToken RequestExpired UnauthorizedSSOTokenError SSOTokenLoadError",
    "the server does not accept the credentials{}; check them, or the signed URL": "EACCES 401 SignatureDoesNotMatch "
    "InvalidAccessKeyId InvalidSecurity AuthenticationFailed InvalidAuthenticationInfo NoAuthenticationInformation "
    "AuthenticationRequired authError required ClientAuthenticationError",
    "no credentials were found{}; set them as the store's package says": "EACCES NoCredentialsError "
    "PartialCredentialsError ProfileNotFound DefaultCredentialsError CredentialUnavailableError",
    "the server refuses access{}; check the credentials, their rights, and whether a URL has expired": "EACCES 403 "
    "AccessDenied AllAccessDisabled forbidden insufficientPermissions AuthorizationFailure PermissionError "
    "AuthorizationPermissionMismatch InsufficientAccountPermissions",
    "the clock of this machine is not the server's{}; set it": "EPROTO RequestTimeTooSkewed",
    "the object is archived{}; restore it": "EPROTO InvalidObjectState BlobArchived BlobBeingRehydrated",
    "the bucket is in another region, or at another address{}; set AWS_DEFAULT_REGION": "EPROTO 301 PermanentRedirect "
    "AuthorizationHeaderMalformed AuthorizationQueryParametersError IllegalLocationConstraintException",
    "the server refuses the request without a reason{}; check the credentials and the region": "EPROTO 400",
    "the server has no such bucket{}; check its name, or make it": "ENOENT NoSuchBucket ContainerNotFound",
    "the server has no such file{}; check its name": "ENOENT 404 410 NoSuchKey NoSuchVersion BlobNotFound notFound "
    "FileNotFoundError",
    "exists and was left as it was{}; choose another name": "EEXIST PreconditionFailed FileExistsError",
    "the parts that were sent are no longer there{}; write it anew": "EIO NoSuchUpload",
    "the file system of fsspec cannot do this{}; use another": "ENOSYS NotImplementedError",
    "no credentials could be fetched{}": "EAGAIN CredentialRetrievalError MetadataRetrievalError RefreshError",
    "the server is busy{}": f"EAGAIN {' '.join(map(str, AGAIN))} SlowDown RequestTimeout InternalError ServerBusy "
    "ServiceUnavailable OperationAborted ConditionalRequestConflict OperationTimedOut rateLimitExceeded",
}
KNOWN = {code: (codes.split()[0], text) for text, codes in _ANSWERS.items() for code in codes.split()[1:]}
ENDED = {code for code in KNOWN if KNOWN[code] == KNOWN["ExpiredToken"]} | {"400"}  # as Amazon answers HEAD then


def find_code(error: BaseException) -> str:
    """Return the known code of an error of another library, which may be its class; an empty text if there is none."""
    return next((code for code in [*codes_of(error), type(error).__name__] if code in KNOWN), "")


def explain(code: str, url: Url) -> OSError | None:
    """Return the error that a code stands for: a `TransientError` of what may pass. Of other codes return None."""
    if code not in KNOWN:
        return None
    name, text = KNOWN[code]
    message = text.format("" if hasattr(builtins, code) else f" ({code})")
    if name == "EAGAIN":
        return TransientError(message)
    error = OSError(getattr(errno, name), message, str(url))
    vars(error).update(code=code, is_refusal=KNOWN[code] in (KNOWN["401"], KNOWN["ExpiredToken"]))  # the same for all
    return error
