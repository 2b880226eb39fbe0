"""Listing page by page, where each page is checked to go on where the one before ended; and deleting many objects with
one request, whose answer names each of them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

_EMPTY_PAGES = 100  # in succession, before a listing that says it goes on counts as broken


@dataclass
class Listing:
    """What is below `prefix` and after the name `after`; with a `delimiter`, folders.

    `more`: whether further pages follow.
    """

    bucket: str
    prefix: str
    after: str = ""
    delimiter: str = ""
    more: bool = True
    _token: str = ""
    _empty: int = 0

    def attempt(self, client: "S3Client") -> "ListObjectsV2OutputTypeDef":
        """The next page.

        Raises:
            FAILURES: what botocore raises; ValueError, KeyError: a page that cannot be the next one.
        """
        page = client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, **self._place())
        names = _names(page)
        self._check(names)
        more, token = page["IsTruncated"], ""
        if more and (self.delimiter or not names):
            token = page["NextContinuationToken"]
            if token == self._token or (not names and self._empty == _EMPTY_PAGES):
                raise ValueError("the listing does not end")
        self.more, self._token = more, token
        self.after, self._empty = max([self.after, *names]), 0 if names else self._empty + 1
        return page

    def _place(self) -> dict[str, Any]:
        """Where the page begins: by name where that is possible, as a token may expire while the caller is busy."""
        place = {"Delimiter": self.delimiter} if self.delimiter else {}
        if self._token:
            return place | {"ContinuationToken": self._token}
        return place | ({"StartAfter": self.after} if self.after else {})

    def _check(self, names: list[str]) -> None:
        if names and (min(names) <= self.after or len(set(names)) < len(names)):
            raise ValueError("a page of the listing repeats what came before")
        if not all(name.startswith(self.prefix) for name in names):
            raise ValueError("the listing holds other keys than were asked for")


def _names(page: "ListObjectsV2OutputTypeDef") -> list[str]:
    """The keys and folders of a page."""
    keys = [item["Key"] for item in page.get("Contents", ())]
    return keys + [item["Prefix"] for item in page.get("CommonPrefixes", ())]


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
