"""Translates failures of obstore's requests into kinds of `StoreError`.

obstore tells most failures as one class, `GenericError`. What happened is known from its text alone: the status and
body of the answer, and behind the line "Debug source:" the names of Rust's errors, outermost first.
"""

import re
from dataclasses import dataclass

from obstore.exceptions import BaseError

from data_service.printable import mask_secrets, one_line
from data_service.store.errors import (
    AccessDenied,
    BadUri,
    CredentialsExpired,
    CredentialsMissing,
    OutOfSpace,
    StoreError,
    StoreUnavailable,
    error_for_status,
)

FAILURES = (
    BaseError,
    OSError,  # FileNotFoundError for status 404; others from the request for the server's time
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),  # an unexpected answer
    RuntimeError,
)
"""Everything that a request can raise because of the network, the server or a source of credentials."""

_STATUS_RE = re.compile(r"\bcode: (\d{3})\b")
_CODE_RE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE_RE = re.compile(r"<Message>([^<\n]*)")
_KIND_RE = re.compile(r"\bsource: (\w+)")
_CAUSE_RE = re.compile(r'\b(?:message|error): "([^"]+)"')
_STATUS_PREFIX = "Server returned non-2xx status code: "
# Azure's answer to a request for many deletions has this text, but no code.
_NO_CONTAINER_MESSAGE = "specified container does not exist"
_MAX_REASON_CHARACTERS = 300  # largest number of characters of a reason

_MISSING_CREDENTIALS_KINDS = ("Credential", "FederatedTokenFile", "AzureCli", "AzureCliResponse")
_TOKEN_KIND_PREFIX = "Token"  # how Rust's errors about a token begin: TokenRequest, TokenResponseBody
_NO_BUCKET_CODES = ("ContainerNotFound", "NoSuchBucket", "InvalidBucketName", "InvalidResourceName")
# Codes for wrong credentials, which both clouds also send for expired ones.
_WRONG_CREDENTIALS_CODES = (
    *("AuthenticationFailed", "AuthorizationFailure", "InvalidAuthenticationInfo", "NoAuthenticationInformation"),
    *("AuthenticationRequired", "ExpiredToken", "InvalidSecurity", "SignatureDoesNotMatch"),
)  # fmt: skip
_EXPIRED_RE = re.compile(r"expired|lifetime validation|valid in the specified time frame", re.IGNORECASE)
_QUOTA_CODES = ("QuotaExceeded", "AccountCapacityExceeded")
_LOST_UPLOAD_CODES = (
    *("NoSuchUpload", "InvalidPart", "InvalidPartOrder"),
    *("InvalidBlockList", "InvalidBlobOrBlock", "InvalidBlockId"),
)


@dataclass(frozen=True)
class CloudFailure:
    """The properties of a failed request, read from the text of obstore's error.

    Attributes:
        status: the answer's HTTP status; None if there was no answer.
        code: the service's name of the error; "" if the answer has no body.
        kind: Rust's name of the error, as in TokenRequest; "" if it is unknown.
        reason: the failure in one line, without secrets.
    """

    status: int | None
    code: str
    kind: str
    reason: str

    @classmethod
    def from_error(cls, error: Exception) -> "CloudFailure":
        shown, _, source = str(error).partition("Debug source:")
        status, code, kind = (_STATUS_RE.search(shown), _CODE_RE.search(shown), _KIND_RE.search(source))
        return cls(
            status=int(status[1]) if status else None,
            code=code[1] if code else _NO_BUCKET_CODES[0] if _NO_CONTAINER_MESSAGE in shown else "",
            kind=kind[1] if kind else "",
            reason=_failure_reason(error, shown, source),
        )


def _failure_reason(error: Exception, shown: str, source: str) -> str:
    """Return the failure in one line, with code and message if the answer has an error's body."""
    code, message, cause = (_CODE_RE.search(shown), _MESSAGE_RE.search(shown), _CAUSE_RE.search(source))
    head = shown.partition("<?xml")[0].partition("<Error")[0].rstrip(" :\n")
    parts = [head.rpartition(" - ")[2].removeprefix(_STATUS_PREFIX)]
    if code is not None:
        parts += [code[1], message[1] if message else ""]
    elif cause is not None and cause[1] not in shown:
        parts.append(cause[1])
    text = one_line(mask_secrets(": ".join(part for part in parts if part)))
    return text[:_MAX_REASON_CHARACTERS] or type(error).__name__


def is_beyond_end(error: Exception) -> bool:
    """Return whether a request failed because the range that it names begins behind the object's end."""
    failure = CloudFailure.from_error(error)
    return failure.status == 416 or failure.kind == "InvalidRangeRequest"


def translate_error(error: Exception, uri: str, *, had_valid_credentials: bool) -> StoreError:
    """Return our error for `error`, one of `FAILURES`, in a request about `uri`.

    `had_valid_credentials`: whether this process has had credentials that a server accepted.
    """
    failure = CloudFailure.from_error(error)
    if failure.kind.startswith(_TOKEN_KIND_PREFIX) or failure.kind in _MISSING_CREDENTIALS_KINDS:
        kind = CredentialsExpired if had_valid_credentials else CredentialsMissing
        return kind.for_uri(uri, failure.reason)
    if failure.kind == "MissingAccount":
        return BadUri(f"{uri}: no storage account is named", remedy="set AZURE_STORAGE_ACCOUNT_NAME, then start again")
    if failure.kind in ("UnableToParseUrl", "InvalidUrl"):
        return BadUri.for_uri(uri, failure.reason)
    if failure.kind == "InvalidAccessKey":
        return AccessDenied.for_uri(uri, f"AZURE_STORAGE_ACCOUNT_KEY holds no key ({failure.reason})")
    if failure.status is not None:
        return _refusal_error(failure, failure.status, uri, had_valid_credentials)
    if isinstance(error, BaseError | OSError):
        return StoreUnavailable.for_uri(uri, failure.reason)
    return StoreUnavailable.for_uri(
        uri, f"the server's answer makes no sense ({type(error).__name__}: {failure.reason})"
    )


def _refusal_error(failure: CloudFailure, status: int, uri: str, had_valid_credentials: bool) -> StoreError:
    code, reason = failure.code, failure.reason
    if code in _NO_BUCKET_CODES:
        return BadUri.without_bucket(uri)
    if status == 401 or code in _WRONG_CREDENTIALS_CODES:
        expired = had_valid_credentials or _EXPIRED_RE.search(reason) is not None
        return (CredentialsExpired if expired else AccessDenied).for_uri(uri, reason)
    if code in _QUOTA_CODES:
        return OutOfSpace.for_uri(uri, reason)
    transient = code in _LOST_UPLOAD_CODES or status == 412 or status < 400
    return error_for_status(uri, status, reason, transient=transient)
