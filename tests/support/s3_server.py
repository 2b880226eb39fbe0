"""A running S3 server as tests see it."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import boto3
import pytest

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@dataclass(frozen=True)
class S3Server:
    """A server and the credentials of a user who may create buckets."""

    endpoint: str
    access_key: str
    secret_key: str

    @property
    def environment(self) -> dict[str, str]:
        """The settings with which a process reaches this server, whatever this machine's own say."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def use(self, monkeypatch: pytest.MonkeyPatch) -> "S3Server":
        """Points this process at the server."""
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        return self

    def client(self) -> "S3Client":
        return boto3.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )

    def new_bucket(self) -> str:
        """The name of a new, empty bucket."""
        name = f"test-{uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name
