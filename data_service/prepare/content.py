"""Reads the documents of a complete output again, to know whether they changed since it was completed."""

from hashlib import blake2b
from typing import ClassVar

from data_service.ingest.tasks import TaskReceipt
from data_service.prepare.documents import encode_content
from data_service.prepare.passes import ReadTask, read_documents
from data_service.store.base import Store


class HashContentTask(ReadTask):
    """The task of hashing the documents of a chunk."""

    stage: ClassVar[str] = "content"


class ContentReceipt(TaskReceipt):
    """The hash of the documents of a chunk, as in `PassReceipt.content`."""

    content: str


def hash_chunk(task: HashContentTask, store: Store) -> ContentReceipt:
    """Read a chunk and hash its documents; return the receipt. Nothing else is written.

    Raises:
        InputError, StoreError: as `read_records`.
    """
    content = blake2b(digest_size=16)
    for _, found in read_documents(task):
        content.update(encode_content(found))
    return ContentReceipt(source=task.source, content=content.hexdigest())
