"""Translates failures of obstore's requests into kinds of `StoreError`.

obstore raises most failures as one class, `GenericError`. Only its text tells them apart: it holds the status and body
of the answer and, after the line "Debug source:", the names of the Rust errors, outermost first.
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
    OSError,  # FileNotFoundError means status 404; `request_server_time` raises others
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),  # an unexpected answer
    RuntimeError,
)
"""Everything that a request can raise because of the network, the server or a source of credentials."""

_STATUS_RE = re.compile(r"\bcode: (\d{3})\b")
_CODE_RE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE_RE = re.compile(r"<Message>([^<\n]*)")
_KIND_RE = re.compile(r"\bsource: (\w+)")  # name of the first Rust error after "source:"
_CAUSE_RE = re.compile(r'\b(?:message|error): "([^"]+)"')  # message of an inner Rust error
_STATUS_PREFIX = "Server returned non-2xx status code: "
# Azure's answer to a batch deletion has this text, but no error code.
_NO_CONTAINER_MESSAGE = "specified container does not exist"
_MAX_REASON_CHARACTERS = 300  # longer reasons are cut

_MISSING_CREDENTIALS_KINDS = ("Credential", "FederatedTokenFile", "AzureCli", "AzureCliResponse")  # Rust errors
_TOKEN_KIND_PREFIX = "Token"  # prefix of the Rust errors TokenRequest, TokenResponseBody ...
_NO_BUCKET_CODES = ("ContainerNotFound", "NoSuchBucket", "InvalidBucketName", "InvalidResourceName")
# Codes that both clouds send for wrong and for expired credentials.
_WRONG_CREDENTIALS_CODES = (
    *("AuthenticationFailed", "AuthorizationFailure", "InvalidAuthenticationInfo", "NoAuthenticationInformation"),
    *("AuthenticationRequired", "ExpiredToken", "InvalidSecurity", "SignatureDoesNotMatch"),
)  # fmt: skip
_EXPIRED_RE = re.compile(r"expired|lifetime validation|valid in the specified time frame", re.IGNORECASE)
_QUOTA_CODES = ("QuotaExceeded", "AccountCapacityExceeded")
_LOST_UPLOAD_CODES = (  # the server no longer knows the upload or a part of it
    *("NoSuchUpload", "InvalidPart", "InvalidPartOrder"),
    *("InvalidBlockList", "InvalidBlobOrBlock", "InvalidBlockId"),
)


@dataclass(frozen=True)
class CloudFailure:
    """The properties of a failed request, read from the text of obstore's error.

    Attributes:
        status: the answer's HTTP status; None if there was no answer.
        code: the service's error code; "" if the answer has no body.
        kind: name of the Rust error, such as TokenRequest; "" if it is unknown.
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
    """Return the failure in one line, with the code and message of the answer's body if there is one."""
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
    """Return whether a request failed because the requested range starts after the object's end."""
    failure = CloudFailure.from_error(error)
    return failure.status == 416 or failure.kind == "InvalidRangeRequest"


def translate_error(error: Exception, uri: str, *, had_valid_credentials: bool) -> StoreError:
    """Return the StoreError for `error`, one of `FAILURES`, in a request about `uri`.

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
