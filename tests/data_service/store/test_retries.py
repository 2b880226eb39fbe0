"""Requests that had to be made again are counted, for whoever watches the store."""

from fault_proxy import FaultProxy
from s3_server import S3Server

from data_service.store.open import open_store
from data_service.store.patience import total_retries


def test_requests_that_are_made_again_are_counted(s3: S3Server, faults: FaultProxy) -> None:
    store = open_store(f"s3://{s3.new_bucket()}/runs")
    store.put("key", b"data")
    before = total_retries()
    store.get("key")
    assert total_retries() == before
    faults.plan.extend(["slow down"] * 5)  # more than botocore may try by itself
    store.get("key")
    assert not faults.plan
    assert total_retries() > before
