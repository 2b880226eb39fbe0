"""Errors of object stores. Every message names the full URI and what to do."""

from dataclasses import dataclass

from data_service.errors import UserError

AWS_KEYS_REMEDY = "give keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or in ~/.aws"


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """A service's own terms for the messages about its object stores.

    Attributes:
        bucket: the service's word for what holds the objects.
        credentials: where credentials are looked for.
        endpoint: environment variable that names another server.
        place: setting that decides which server holds the bucket, as named in remedies.
    """

    bucket: str
    credentials: str
    endpoint: str
    place: str


SERVICES = {
    "s3": ServiceTerms(
        bucket="bucket",
        credentials="where boto3 finds them (environment, ~/.aws, instance role)",
        endpoint="AWS_ENDPOINT_URL",
        place="the region (AWS_REGION)",
    ),
    "gs": ServiceTerms(
        bucket="bucket",
        credentials="by GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login` or the machine's "
        "service account",
        endpoint="GOOGLE_BASE_URL",
        place="the project",
    ),
    "az": ServiceTerms(
        bucket="container",
        credentials="in AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, by AZURE_CLIENT_ID, AZURE_TENANT_ID and "
        "AZURE_CLIENT_SECRET, or the machine's managed identity",
        endpoint="AZURE_STORAGE_ENDPOINT",
        place="the account (AZURE_STORAGE_ACCOUNT_NAME)",
    ),
}
"""The services whose object stores can be written to, by the scheme of their URIs."""


def _service_terms(uri: str) -> ServiceTerms:
    """Return the service's terms for a URI; those of S3 if its scheme is not in `SERVICES`."""
    return SERVICES.get(uri.partition("://")[0].lower(), SERVICES["s3"])


class StoreError(UserError):
    """A failed operation on an object store."""


class KeyMissing(StoreError):
    """An object that does not exist."""

    @classmethod
    def for_uri(cls, uri: str) -> "KeyMissing":
        return cls(f"{uri} does not exist", remedy="check the URI; list the folder above it to see what is there")


class Truncated(StoreError):
    """An object that is too short: it ends before the last requested byte."""

    @classmethod
    def for_uri(cls, uri: str, start: int, length: int, size: int) -> "Truncated":
        problem = f"{uri} ends at byte {size}, but bytes {start} to {start + length} are needed"
        return cls(problem, remedy="restore the object from a copy, or write it again: it is truncated")


class AccessDenied(StoreError):
    """An object to which the store refuses access."""

    @classmethod
    def for_uri(cls, uri: str, reason: str) -> "AccessDenied":
        return cls(f"no permission for {uri}: {reason}", remedy="check the permissions or the credentials in use")


class CredentialsMissing(AccessDenied):
    """No credentials in a process that never had valid ones. The operation is retried for a short time, because
    credentials may be issued late."""

    @classmethod
    def for_uri(cls, uri: str, reason: str) -> "CredentialsMissing":
        remedy = f"give credentials {_service_terms(uri).credentials}, then start again"
        return cls(f"no credentials for {uri}: {reason}", remedy=remedy)


class CredentialsExpired(AccessDenied):
    """Credentials that were valid earlier. The operation is retried, because they may have been renewed."""

    @classmethod
    def for_uri(cls, uri: str, reason: str) -> "CredentialsExpired":
        remedy = f"renew the credentials {_service_terms(uri).credentials}, then start again"
        return cls(f"the credentials for {uri} have expired or cannot be renewed: {reason}", remedy=remedy)


class OutOfSpace(StoreError):
    """A store that is full. Objects that were stored earlier are unharmed."""

    @classmethod
    def for_uri(cls, uri: str, reason: str) -> "OutOfSpace":
        return cls(
            f"no space left to write {uri}: {reason}",
            remedy="free space or raise the quota, then start again",
        )


class StoreUnavailable(StoreError):
    """A store that gave no valid answer, even after all retries."""

    @classmethod
    def for_uri(cls, uri: str, reason: str) -> "StoreUnavailable":
        where = (
            f"the network and the endpoint ({_service_terms(uri).endpoint})"
            if "://" in uri
            else "the disk or the mount"
        )
        return cls(f"cannot reach {uri}: {reason}", remedy=f"check {where}, then start again")


class BadUri(StoreError):
    """A URI or key that is invalid."""

    @classmethod
    def for_uri(cls, uri: str, reason: str) -> "BadUri":
        return cls(
            f"{uri!r}: {reason}",
            remedy="use another name in a folder or s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
        )

    @classmethod
    def with_secret(cls, uri: str) -> "BadUri":
        scheme, words = uri.partition("://")[0].lower(), _service_terms(uri)
        place, keys = "s3://bucket/prefix", AWS_KEYS_REMEDY
        if scheme in SERVICES and scheme != "s3":
            place, keys = f"{scheme}://{words.bucket}/prefix", f"give credentials {words.credentials}"
        return cls(
            f"{uri!r} holds a secret key or a signature, which would be recorded and shown",
            remedy=f"write {place} alone; {keys}",
        )

    @classmethod
    def without_bucket(cls, uri: str) -> "BadUri":
        scheme, _, rest = uri.partition("://")
        words = _service_terms(uri)
        return cls(
            f"{scheme}://{rest.partition('/')[0]}: the {words.bucket} does not exist, or is elsewhere",
            remedy=f"create the {words.bucket}, or correct its name, {words.place} or the server ({words.endpoint})",
        )


def error_for_status(uri: str, status: int, reason: str, *, transient: bool) -> StoreError:
    """Return the error for an answer with this HTTP status. `transient`: whether a retry may succeed."""
    if status == 507:
        return OutOfSpace.for_uri(uri, reason)
    if transient or status in (408, 409, 429) or (status >= 500 and status != 501):
        return StoreUnavailable.for_uri(uri, reason)
    if status == 404:
        return KeyMissing.for_uri(uri)
    if status in (401, 403):
        return AccessDenied.for_uri(uri, reason)
    return StoreError(f"the store refuses {uri}: {reason}", remedy="check that the server supports this request")


TRANSIENT_ERRORS = (StoreUnavailable, CredentialsExpired, CredentialsMissing)
"""Errors that may disappear by themselves. A caller that can wait should try again."""
RETRYABLE_ERRORS = (*TRANSIENT_ERRORS, OutOfSpace)
"""Errors after which the same command may succeed later. A full store needs somebody to free space first."""
