"""A running S3 server as tests see it; a certificate for it, and a metadata service that hands out credentials."""

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

import boto3
import pytest

from tests.support.stores.fault_proxy import S3_ERRORS, Errors
from tests.support.stores.http_server import LocalHandler, LocalServer
from tests.support.stores.service import Service

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

DATA = os.urandom(100_000)
"""What an object of a test holds."""


@dataclass(frozen=True)
class S3Server(Service):
    """A server and the credentials of a user who may create buckets."""

    endpoint: str
    access_key: str
    secret_key: str
    scheme: ClassVar[str] = "s3"
    variables: ClassVar[str] = "AWS_"
    errors: ClassVar[Errors] = S3_ERRORS

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def reach(self, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)

    def renew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gives this process another key, which moto takes as any other."""
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")

    def forge(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gives this process a secret that the server refuses; moto takes any."""
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")

    def take_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes this process's credentials away."""
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)

    def client(self) -> "S3Client":
        return boto3.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )

    def new_bucket(self) -> str:
        name = f"test-{uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name


class MetadataService(LocalServer):
    """Answers as Amazon's does, after it has refused `refusals` questions. A context manager."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        super().__init__(_Handler)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes this process's credentials away, and points it here for others."""
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{self.endpoint}/")


class _Handler(LocalHandler):
    server_state: MetadataService

    def _serve(self) -> None:
        if self.server_state.refusals:
            self.server_state.refusals -= 1
            self.send_answer(503, b"busy")
        elif self.path.endswith("/token"):
            self.send_answer(200, b"a-token")
        elif self.path.endswith("/security-credentials/"):
            self.send_answer(200, b"a-role")
        else:
            expiration = (datetime.now(UTC) + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ")
            keys = {"AccessKeyId": "role", "SecretAccessKey": "secret", "Token": "token"}
            answer = {"Code": "Success", "Type": "AWS-HMAC", "Expiration": expiration, **keys}
            self.send_answer(200, json.dumps(answer).encode())

    do_GET = do_PUT = _serve
