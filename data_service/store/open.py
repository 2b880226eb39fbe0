"""Opens the store that a URI names."""

from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from data_service.printable import escape_controls, mask_secrets
from data_service.store.base import Store
from data_service.store.errors import SERVICES, BadUri, StoreError
from data_service.store.local import LocalStore
from data_service.store.retries import default_patience_s

_PLACEHOLDER_BUCKET = "your-bucket"  # the bucket's name in the bundled recipes


def open_store(uri: str | Path, *, patience_s: float | None = None) -> Store:
    """Return the store at a folder, `file:///folder`, `s3://bucket/prefix`, `gs://bucket/prefix`,
    `az://container/prefix` or (read-only) `hf://datasets/OWNER/NAME`. Nothing is contacted or created yet.

    `patience_s`: seconds without progress after which a failing operation on a remote store is given up. None: the
    number in the environment variable MASKFLEET_STORE_PATIENCE_S, else 120.

    Raises:
        BadUri: the scheme is unknown, or the bucket or folder is missing from the URI.
        StoreError: MASKFLEET_STORE_PATIENCE_S holds no positive number, or a library that the scheme needs is not
            installed.
    """
    text = str(uri)
    scheme, separator, rest = text.partition("://")
    if not text:
        raise BadUri.for_uri(text, "the URI is empty")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadUri(
            f"{escape_controls(text)}: its name is not valid UTF-8",
            remedy="rename the file or folder; no JSON can hold this name",
        )
    if mask_secrets(text) != text:
        raise BadUri.with_secret(text)
    if not separator:
        return LocalStore(_expand_home(text).absolute())
    match scheme.lower():
        case "file":
            return _open_file_uri(text, rest)
        case "s3":
            return _open_s3(text, rest, default_patience_s() if patience_s is None else patience_s)
        case "gs" | "az" as cloud:
            return _open_cloud(text, cloud, rest, default_patience_s() if patience_s is None else patience_s)
        case "hf":
            from data_service.store.hub import open_hub

            return open_hub(text, rest, default_patience_s() if patience_s is None else patience_s)
        case _:
            raise BadUri.for_uri(text, f"unknown scheme {scheme!r}")


def open_store_of_file(path: str) -> tuple[Store, str]:
    """Return the store of the folder in which a file lies, and the file's name. Raises as `open_store`."""
    return open_store(parent_folder(path)), path.rpartition("/")[2]


def parent_folder(path: str) -> str:
    """Return the folder (path or URI) that contains the file at `path` (path or URI)."""
    folder, slash, _ = path.rpartition("/")
    return folder or ("/" if slash else ".")


def _expand_home(text: str) -> Path:
    """Return the path with `~` or `~user` expanded; unchanged if the home folder is unknown, as in shells."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _open_file_uri(uri: str, rest: str) -> Store:
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise BadUri.for_uri(uri, "a file URI needs three slashes and an absolute folder")
    return LocalStore(Path(unquote(path)))


def _open_s3(uri: str, rest: str, patience_s: float) -> Store:
    from data_service.store.s3 import S3Store  # boto3 takes a third of a second to import

    return S3Store(*_split_bucket(uri, "s3", rest), patience_s)


def _open_cloud(uri: str, scheme: Literal["gs", "az"], rest: str, patience_s: float) -> Store:
    try:
        from data_service.store.cloud import open_cloud
    except ImportError as error:
        raise StoreError(
            f"{uri} needs obstore, which is not installed", remedy="pip install 'maskfleet[clouds]'"
        ) from error
    return open_cloud(scheme, *_split_bucket(uri, scheme, rest), patience_s)


def _split_bucket(uri: str, scheme: str, rest: str) -> tuple[str, str]:
    """Return bucket and prefix. Raises BadUri: the bucket is missing, or is the placeholder of bundled recipes."""
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise BadUri.for_uri(uri, f"the URI names no {SERVICES[scheme].bucket}")
    if bucket == _PLACEHOLDER_BUCKET:
        raise BadUri(
            f"{uri}: {_PLACEHOLDER_BUCKET} is a placeholder for the name of your bucket",
            remedy=f"replace it by your bucket's name; `maskfleet doctor {scheme}://BUCKET` tests the bucket",
        )
    return bucket, prefix.strip("/")


def is_writable_object_store(uri: str) -> bool:
    """Return whether a URI lies in a writable object store (S3, Google Cloud Storage, Azure): all machines see it."""
    scheme, separator, _ = uri.partition("://")
    return bool(separator) and scheme.lower() in SERVICES
