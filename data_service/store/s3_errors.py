"""What a failed S3 request means: botocore's errors and the server's codes, as the kinds of `StoreError`."""

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)

from data_service.store.errors import (
    AccessDenied,
    BadUri,
    CredentialsExpired,
    KeyMissing,
    OutOfSpace,
    StoreError,
    StoreUnavailable,
)

_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
_FULL = ("QuotaExceeded", "InsufficientCapacity")
_NO_BUCKET = ("NoSuchBucket", "InvalidBucketName", "PermanentRedirect")
_BUSY = ("RequestTimeout", "ConditionalRequestConflict", "OperationAborted")


def code(error: ClientError) -> str:
    """The server's code, or the HTTP status as text where the answer had no body (HEAD)."""
    return str(error.response.get("Error", {}).get("Code", ""))


def translated(error: BotoCoreError | ClientError, uri: str) -> StoreError:
    """Our error for a failed request about `uri`; `StoreUnavailable` and `CredentialsExpired` may pass."""
    match error:
        case ClientError():
            return _refused(error, uri)
        case NoCredentialsError() | PartialCredentialsError() | ProfileNotFound():
            return AccessDenied.at(uri, str(error))
        case ParamValidationError():
            return BadUri.at(uri, str(error))
        case _:
            return StoreUnavailable.at(uri, str(error))


def _refused(error: ClientError, uri: str) -> StoreError:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    name, reason = code(error), str(error)
    if name in _EXPIRED:
        return CredentialsExpired.at(uri, reason)
    if name in _NO_BUCKET:
        return BadUri.at(uri, "the bucket does not exist, or not in this region")
    if name in _FULL or status == 507:
        return OutOfSpace.at(uri, reason)
    if name in _BUSY or status in (408, 409, 429) or (status >= 500 and status != 501):
        return StoreUnavailable.at(uri, reason)
    if status == 404:
        return KeyMissing.at(uri)
    if status in (401, 403):
        return AccessDenied.at(uri, reason)
    return StoreError(
        f"the store refuses {uri}: {reason}", remedy="check that the server supports this request"
    )
