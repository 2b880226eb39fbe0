"""Deleting many objects with one request, which answers for each of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

DELETED = 1000  # objects that one request may name
_ABSENT = ("NoSuchKey", "NoSuchVersion")
_STATUS = {"AccessDenied": 403}  # what a request for the object alone would be answered with


@dataclass
class Deletion:
    """The objects `names`, at most `DELETED`. Each attempt is about those that are still there."""

    bucket: str
    names: list[str]

    def attempt(self, client: "S3Client") -> None:
        """Raises FAILURES: what botocore raises, or the server says of an object that it did not delete."""
        answer = client.delete_objects(
            Bucket=self.bucket, Delete={"Objects": [{"Key": name} for name in self.names], "Quiet": True}
        )
        refused = [error for error in answer.get("Errors", ()) if error["Code"] not in _ABSENT]
        self.names = [error["Key"] for error in refused]
        if refused:
            first = refused[0]
            status = _STATUS.get(first["Code"], 503)
            told = {
                "Error": {"Code": first["Code"], "Message": f"{first['Key']}: {first.get('Message', '')}"},
                "ResponseMetadata": {"HTTPStatusCode": status},
            }
            raise ClientError(cast(Any, told), "DeleteObjects")
