"""Translates failures of S3 requests (botocore's exceptions, the server's error codes) into kinds of `StoreError`."""

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
    OutOfSpace,
    StoreError,
    StoreUnavailable,
    error_for_status,
)

FAILURES = (
    *(BotoCoreError, ClientError, ResponseParserError),
    *(HTTPError, HTTPException, OSError),  # botocore does not wrap them while a body is read
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),  # an unexpected answer
    RuntimeError,
)
"""Everything that a botocore request can raise because of the network, the server or a source of credentials."""

_EXPIRED_CODES = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
# Codes for wrong credentials. Some servers also send them for expired credentials, or while a credentials file changes.
_WRONG_CREDENTIALS_CODES = (
    *("InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId", "InvalidIdentityToken"),
    *("SignatureDoesNotMatch", "UnrecognizedClientException"),
)
_QUOTA_CODES = ("QuotaExceeded", "InsufficientCapacity")
_NO_BUCKET_CODES = ("NoSuchBucket", "InvalidBucketName", "PermanentRedirect")
_RETRYABLE_CODES = (
    *("RequestTimeout", "ConditionalRequestConflict", "OperationAborted", "TemporaryRedirect"),
    *("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "IDPCommunicationError"),
    "RequestTimeTooSkewed",  # NTP soon corrects a wrong clock
    *("InternalError", "ServiceUnavailable", "ServerBusy", "IncompleteBody", "XMinioServerNotInitialized"),
)
_MISSING_CREDENTIALS_ERRORS = (
    *(NoCredentialsError, PartialCredentialsError, ConfigParseError),
    *(SSOError, LoginError, TokenRetrievalError),
)
# Credentials could not be loaded again.
_RENEWAL_ERRORS = (CredentialRetrievalError, MetadataRetrievalError, ProfileNotFound)
LOST_UPLOAD_CODES = ("NoSuchUpload", "InvalidPart", "InvalidPartOrder")
"""Codes by which a server says that it no longer knows an upload or a part of it. The upload then starts again."""


def error_code(error: ClientError) -> str:
    """Return the server's error code, such as "NoSuchKey"; for an answer without a body (HEAD) the HTTP status."""
    return str(error.response.get("Error", {}).get("Code", ""))


def translate_error(error: Exception, uri: str, *, had_valid_credentials: bool) -> StoreError:
    """Return the StoreError for `error`, one of `FAILURES`, in a request about `uri`.

    `had_valid_credentials`: whether this process has had credentials that a server accepted.
    """
    if isinstance(error, ClientError):
        return _refusal_error(error, uri, had_valid_credentials)
    if isinstance(error, _MISSING_CREDENTIALS_ERRORS):
        kind = CredentialsExpired if had_valid_credentials else CredentialsMissing
        return kind.for_uri(uri, str(error))
    if isinstance(error, ProfileNotFound) and not had_valid_credentials:
        return AccessDenied.for_uri(uri, str(error))
    if isinstance(error, _RENEWAL_ERRORS) or (isinstance(error, RuntimeError) and "redential" in str(error)):
        # botocore raises a plain RuntimeError if renewed credentials have already expired.
        return CredentialsExpired.for_uri(uri, str(error))
    if isinstance(error, ParamValidationError):
        return BadUri.for_uri(uri, str(error))
    if isinstance(error, BotoCoreError | HTTPError | HTTPException | OSError):
        return StoreUnavailable.for_uri(uri, str(error) or type(error).__name__)
    return StoreUnavailable.for_uri(uri, f"the server's answer makes no sense ({type(error).__name__}: {error})")


def _refusal_error(error: ClientError, uri: str, had_valid_credentials: bool) -> StoreError:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    name, reason = error_code(error), str(error)
    if name in _EXPIRED_CODES or (had_valid_credentials and name in _WRONG_CREDENTIALS_CODES):
        return CredentialsExpired.for_uri(uri, reason)
    if name in _NO_BUCKET_CODES:
        return BadUri.without_bucket(uri)
    if name in _QUOTA_CODES:
        return OutOfSpace.for_uri(uri, reason)
    # An answer with status 200 may report an error in its body.
    transient = name in _RETRYABLE_CODES or name in LOST_UPLOAD_CODES or status < 300
    return error_for_status(uri, status, reason, transient=transient)
