"""Files that a stage needs on every machine, each named with its hash, so that all workers decide alike."""

import hashlib
from functools import lru_cache
from pathlib import Path

from data_service.errors import PrepareError


@lru_cache(maxsize=8)
def check_file_hash(path: str, expected: str, file_kind: str) -> None:
    """Check that a file has a SHA-256. It is read once in a process. `file_kind`: what it is, for messages.

    Raises PrepareError: the file is missing or has another hash.
    """
    try:
        with Path(path).open("rb") as stream:
            seen = hashlib.file_digest(stream, "sha256")
    except OSError as error:
        raise PrepareError(
            f"the {file_kind} {path} cannot be read: {error}",
            remedy="bring the file to that place on every machine, or name another one; nothing was started",
        ) from error
    if seen.hexdigest() != expected:
        raise PrepareError(
            f"the {file_kind} {path} has the SHA-256 {seen.hexdigest()}, not {expected}",
            remedy="fetch the file again, or give the hash of the one that is meant",
        )
