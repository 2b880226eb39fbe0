"""Checks files that a stage needs on every machine by their hashes, so that all workers decide alike."""

import hashlib
from functools import lru_cache
from pathlib import Path

from data_service.errors import PrepareError


@lru_cache(maxsize=8)
def check_file_hash(path: str, expected: str, file_kind: str) -> None:
    """Check a file's SHA-256, once per process. `expected`: in hexadecimal; `file_kind`: name for messages.

    Raises PrepareError: the file is missing or has another hash.
    """
    try:
        with Path(path).open("rb") as stream:
            seen = hashlib.file_digest(stream, "sha256")
    except OSError as error:
        raise PrepareError(
            f"the {file_kind} {path} cannot be read: {error}",
            remedy="put the file at this path on every machine, or give another path; nothing was started",
        ) from error
    if seen.hexdigest() != expected:
        raise PrepareError(
            f"the {file_kind} {path} has the SHA-256 {seen.hexdigest()}, not {expected}",
            remedy="fetch the file again, or set `sha256` to the hash of the intended file",
        )
