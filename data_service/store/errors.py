"""Errors of object stores. Every message names the full URI and what to do."""

from data_service.errors import UserError

KEYS = "give keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or in ~/.aws"


class StoreError(UserError):
    """A failed operation on an object store."""


class KeyMissing(StoreError):
    """An object that does not exist."""

    @classmethod
    def at(cls, uri: str) -> "KeyMissing":
        return cls(
            f"{uri} does not exist", remedy="check the URI; list the folder above it to see what is there"
        )


class Truncated(StoreError):
    """An object that ends before the bytes that should be read from it."""

    @classmethod
    def at(cls, uri: str, start: int, length: int, size: int) -> "Truncated":
        problem = f"{uri} ends at byte {size}, but bytes {start} to {start + length} are needed"
        return cls(problem, remedy="restore the object from a copy, or write it again: it is truncated")


class AccessDenied(StoreError):
    """An object to which the store refuses access."""

    @classmethod
    def at(cls, uri: str, reason: str) -> "AccessDenied":
        return cls(
            f"no permission for {uri}: {reason}", remedy="check the permissions or the credentials in use"
        )


class CredentialsMissing(AccessDenied):
    """A lack of credentials in a process that never had any. It is retried for a short time: they may be issued
    late."""

    @classmethod
    def at(cls, uri: str, reason: str) -> "CredentialsMissing":
        remedy = (
            "give credentials where boto3 finds them (environment, ~/.aws, instance role), then start again"
        )
        return cls(f"no credentials for {uri}: {reason}", remedy=remedy)


class CredentialsExpired(AccessDenied):
    """Credentials that were valid earlier. The operation is retried, because they may be renewed meanwhile."""

    @classmethod
    def at(cls, uri: str, reason: str) -> "CredentialsExpired":
        remedy = "renew the credentials where boto3 finds them (environment, ~/.aws, instance role), then start again"
        return cls(f"the credentials for {uri} have expired or cannot be renewed: {reason}", remedy=remedy)


class OutOfSpace(StoreError):
    """A store that is full. Objects that were stored earlier are unharmed."""

    @classmethod
    def at(cls, uri: str, reason: str) -> "OutOfSpace":
        return cls(
            f"no space left to write {uri}: {reason}",
            remedy="free space or raise the quota, then start again",
        )


class StoreUnavailable(StoreError):
    """A store that gave no valid answer, even after all retries."""

    @classmethod
    def at(cls, uri: str, reason: str) -> "StoreUnavailable":
        where = "the network and the endpoint (AWS_ENDPOINT_URL)" if "://" in uri else "the disk or the mount"
        return cls(f"cannot reach {uri}: {reason}", remedy=f"check {where}, then start again")


class BadUri(StoreError):
    """A URI or key that is invalid."""

    @classmethod
    def at(cls, uri: str, reason: str) -> "BadUri":
        return cls(
            f"{uri!r}: {reason}",
            remedy="use another name in a folder or below s3://bucket/prefix",
        )

    @classmethod
    def with_secret(cls, uri: str) -> "BadUri":
        return cls(
            f"{uri!r} holds a secret key or a signature, which would be recorded and shown",
            remedy=f"write s3://bucket/prefix alone; {KEYS}",
        )

    @classmethod
    def no_bucket(cls, uri: str) -> "BadUri":
        bucket = uri.partition("://")[2].partition("/")[0]
        return cls(
            f"s3://{bucket}: the bucket does not exist, or is in another region",
            remedy="create the bucket, or correct its name, the region (AWS_REGION) or the server (AWS_ENDPOINT_URL)",
        )


TRANSIENT = (StoreUnavailable, CredentialsExpired, CredentialsMissing)
"""Errors that may disappear by themselves. A caller that can wait should try again."""
