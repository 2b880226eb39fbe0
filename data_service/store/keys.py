"""What a key may look like: the same rules for every store, so that a run can move from one to another."""

from data_service.store.errors import BadUri

TEMPORARY = ".tmp-"  # names of files still being written start like this; no store lists them


def checked(root: str, key: str) -> str:
    """The key, if it is a plain relative path.

    Raises:
        BadUri: it is empty or absolute, or one of its parts is empty, "." or "..", or reserved.
    """
    for part in key.split("/"):
        if part in ("", ".", "..") or "\0" in part or part.startswith(TEMPORARY):
            raise BadUri.at(f"{root}/{key}", f"{part!r} cannot be part of a key")
    return key


def child(prefix: str, more: str) -> str:
    """`prefix` extended by `more`: both "" or slash-separated paths, slashes around them or not."""
    return "/".join(part for part in (prefix.strip("/"), more.strip("/")) if part)
