"""Small JSON objects that carry the digest of their content, so that damage is never taken for a figure.

{"digest": "...", "content": {...}}
"""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.verified import ATTEMPTS, digest

M = TypeVar("M", bound=BaseModel)


class _Sealed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    content: dict[str, object]


def seal(content: BaseModel) -> bytes:
    """The object's bytes: the same for the same content."""
    data = content.model_dump_json()
    return f'{{"digest": "{digest(data.encode())}", "content": {data}}}\n'.encode()


def read(store: Store, key: str, kind: type[M]) -> M | None:
    """What is stored at `key`. None if it is absent, or is no such object however often it is read.

    Raises StoreError kinds, but KeyMissing.
    """
    for _ in range(ATTEMPTS):
        try:
            data = store.get(key)
        except KeyMissing:
            return None
        found = _unsealed(data, kind)
        if found is not None:
            return found
    return None


def _unsealed(data: bytes, kind: type[M]) -> M | None:
    try:
        sealed = _Sealed.model_validate_json(data)
        found = kind.model_validate(sealed.content)
    except ValidationError:
        return None
    return found if digest(found.model_dump_json().encode()) == sealed.digest else None
