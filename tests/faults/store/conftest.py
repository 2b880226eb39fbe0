"""A store behind a proxy that fails, of every object store."""

from collections.abc import Iterator

import pytest

from data_service.store.base import Store
from data_service.store.open import open_store
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import DATA
from tests.support.stores.service import Service

SERVICES = ("s3", "gs", pytest.param("az", marks=[pytest.mark.azurite, pytest.mark.long]))


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> Service:
    """A server to which the environment points: moto's S3, a fake of Google's storage, Azurite."""
    server: Service = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def faults(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, to which the environment points; it injects nothing until told to."""
    with FaultProxy(service.endpoint, errors=service.errors) as proxy:
        service.reach(proxy.endpoint, monkeypatch)
        yield proxy


@pytest.fixture
def store(service: Service, faults: FaultProxy) -> Store:
    """A store behind the proxy, with one object."""
    store = open_store(f"{service.scheme}://{service.new_bucket()}/runs")
    store.put("key", DATA)
    faults.requests.clear()
    return store
