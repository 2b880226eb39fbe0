"""A store behind a proxy that fails."""

import pytest

from data_service.store.base import Store
from data_service.store.open import open_store
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import DATA, S3Server


@pytest.fixture
def store(s3: S3Server, faults: FaultProxy) -> Store:
    """A store behind the proxy, with one object."""
    store = open_store(f"s3://{s3.new_bucket()}/runs")
    store.put("key", DATA)
    faults.requests.clear()
    return store
