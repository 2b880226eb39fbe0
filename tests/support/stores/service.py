"""A server of object storage as tests of every service see it."""

import os
from typing import ClassVar, Protocol, Self

import pytest

from tests.support.stores.fault_proxy import Errors


class Service(Protocol):
    """A server that is reached by what the environment says, in variables whose names begin with `variables`."""

    scheme: ClassVar[str]
    variables: ClassVar[str]
    errors: ClassVar[Errors]
    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """The settings with which a process reaches this server, whatever this machine's own say."""
        ...

    def new_bucket(self) -> str:
        """The name of a new, empty bucket."""
        ...

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Points this process at the server."""
        for name in [name for name in os.environ if name.startswith(self.variables)]:
            monkeypatch.delenv(name)
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        return self

    def reach(self, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Points this process at a proxy before the server."""
        ...

    def renew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gives this process other credentials, which the server takes, too."""
        ...

    def forge(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gives this process credentials that the server refuses."""
        ...

    def take_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes this process's credentials away, and all other sources of them."""
        ...
