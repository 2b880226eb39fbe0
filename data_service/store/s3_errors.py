"""Translates failures of S3 requests, botocore's errors and the server's codes, into kinds of `StoreError`."""

from http.client import HTTPException

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigParseError,
    CredentialRetrievalError,
    LoginError,
    MetadataRetrievalError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from data_service.store.errors import (
    AccessDenied,
    BadUri,
    CredentialsExpired,
    CredentialsMissing,
    KeyMissing,
    OutOfSpace,
    StoreError,
    StoreUnavailable,
)

FAILURES = (
    *(BotoCoreError, ClientError, ResponseParserError),
    *(HTTPError, HTTPException, OSError),  # raised unwrapped while a body is read
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),  # an answer of another shape
    RuntimeError,
)
"""Everything that a botocore request can raise because of the network, the server or a source of credentials."""

_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
# Codes for wrong credentials. Some servers also send them for expired ones, or while a credentials file is replaced.
_EXPIRED_IF_VALID_BEFORE = (
    *("InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId", "InvalidIdentityToken"),
    *("SignatureDoesNotMatch", "UnrecognizedClientException"),
)
_FULL_CODES = ("QuotaExceeded", "InsufficientCapacity")
_NO_BUCKET = ("NoSuchBucket", "InvalidBucketName", "PermanentRedirect")
_BUSY = (
    *("RequestTimeout", "ConditionalRequestConflict", "OperationAborted", "TemporaryRedirect"),
    *("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "IDPCommunicationError"),
    *("InternalError", "ServiceUnavailable", "ServerBusy", "IncompleteBody", "XMinioServerNotInitialized"),
)
_NO_CREDENTIALS = (
    *(NoCredentialsError, PartialCredentialsError, ConfigParseError),
    *(SSOError, LoginError, TokenRetrievalError),
)
_NOT_RENEWED = (CredentialRetrievalError, MetadataRetrievalError, ProfileNotFound)
LOST_UPLOAD = ("NoSuchUpload", "InvalidPart", "InvalidPartOrder")
"""Codes of a server that no longer knows an upload or a part of it. The upload then begins again."""


def code(error: ClientError) -> str:
    """Return the server's error code; the HTTP status as text if the answer has no body (HEAD)."""
    return str(error.response.get("Error", {}).get("Code", ""))


def translated(error: Exception, uri: str, *, valid_before: bool) -> StoreError:
    """Return our error for `error`, one of `FAILURES`, in a request about `uri`.

    `valid_before`: whether this process has had credentials that a server accepted.
    """
    if isinstance(error, ClientError):
        return _refused(error, uri, valid_before)
    if isinstance(error, _NO_CREDENTIALS):
        kind = CredentialsExpired if valid_before else CredentialsMissing
        return kind.at(uri, str(error))
    if isinstance(error, ProfileNotFound) and not valid_before:
        return AccessDenied.at(uri, str(error))
    if isinstance(error, _NOT_RENEWED) or (isinstance(error, RuntimeError) and "redential" in str(error)):
        # botocore has no class of its own for renewed credentials that have expired.
        return CredentialsExpired.at(uri, str(error))
    if isinstance(error, ParamValidationError):
        return BadUri.at(uri, str(error))
    if isinstance(error, BotoCoreError | HTTPError | HTTPException | OSError):
        return StoreUnavailable.at(uri, str(error) or type(error).__name__)
    return StoreUnavailable.at(uri, f"the server's answer makes no sense ({type(error).__name__}: {error})")


def _refused(error: ClientError, uri: str, valid_before: bool) -> StoreError:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    name, reason = code(error), str(error)
    if name in _EXPIRED or (valid_before and name in _EXPIRED_IF_VALID_BEFORE):
        return CredentialsExpired.at(uri, reason)
    if name in _NO_BUCKET:
        return BadUri.no_bucket(uri)
    if name in _FULL_CODES or status == 507:
        return OutOfSpace.at(uri, reason)
    if (
        name in _BUSY
        or name in LOST_UPLOAD
        or status in (408, 409, 429)
        or (status >= 500 and status != 501)
        or status < 300  # an error in the body of an answer that began as a success
    ):
        return StoreUnavailable.at(uri, reason)
    if status == 404:
        return KeyMissing.at(uri)
    if status in (401, 403):
        return AccessDenied.at(uri, reason)
    return StoreError(
        f"the store refuses {uri}: {reason}", remedy="check that the server supports this request"
    )
