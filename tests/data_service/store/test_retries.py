"""Requests that had to be made again are counted, for whoever watches the store."""

import pytest

from data_service.store.open import open_store
from data_service.store.retries import total_retries
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server


@pytest.mark.long
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
