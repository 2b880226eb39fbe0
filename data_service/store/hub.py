"""Data sets of the Hugging Face Hub, read-only: hf://datasets/OWNER/NAME[@REVISION][/FOLDER].

The first request looks up the revision's commit hash. From then on the store's URI holds the hash, so every process
that opens that URI reads the same bytes, whatever is pushed meanwhile. HF_ENDPOINT is the URL of another server,
HF_TOKEN the token for data sets that are not public.
"""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from data_service.store.base import Entry, Store, check_key, join_path
from data_service.store.errors import AccessDenied, BadUri, KeyMissing, StoreError, StoreUnavailable, Truncated
from data_service.store.retries import RetryLimit, call_with_retries, get_outage

SCHEME = "hf"
_DATASET_URI = re.compile(  # the URI after the scheme
    r"datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/(?:convert/[\w-]+|pr/\d+)|[^/@]+))?(?:/(?P<prefix>.*))?"
)
_COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
_TOKEN_REMEDY = "set HF_TOKEN to a token with access to the data set, or copy the files to a folder or to S3"
_T = TypeVar("_T")


def open_hub(uri: str, rest: str, patience_s: float) -> Store:
    """Return the store of `uri`. `rest`: the URI after the scheme. Nothing is contacted.

    Raises:
        BadUri: the URI is not that of a data set.
        StoreError: huggingface_hub is not installed.
    """
    found = _DATASET_URI.fullmatch(rest)
    if found is None:
        raise BadUri(
            f"{uri} names no data set of the Hub",
            remedy="write hf://datasets/OWNER/NAME, hf://datasets/OWNER/NAME@REVISION or a folder below it",
        )
    return HubStore(found["repo"], found["revision"] or "main", (found["prefix"] or "").strip("/"), patience_s)


class HubStore(Store):
    """A read-only store of the files below `prefix` in a data set."""

    def __init__(self, repo: str, revision: str, prefix: str, patience_s: float) -> None:
        self._repo, self._revision, self._prefix, self._patience_s = repo, revision, prefix, patience_s
        self._hub = _import_hub(self.uri)

    @property
    def uri(self) -> str:
        return f"{SCHEME}://{join_path(f'datasets/{self._repo}@{self._revision}', self._prefix)}"

    def with_prefix(self, prefix: str) -> "HubStore":
        return HubStore(self._repo, self._revision, join_path(self._prefix, prefix), self._patience_s)

    def get(self, key: str) -> bytes:
        return self._read(key, {})

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:  # as in `BucketStore.get_range`
            return b"" if self.size(key) is not None else self.get(key)
        data = self._read(key, {"Range": f"bytes={start}-{start + length - 1}"})
        if len(data) != length:
            raise Truncated.for_uri(self._file_uri(key), start, length, start + len(data))
        return data

    def entry(self, key: str) -> Entry | None:
        path = self._path_in_repo(key)

        def request_path_info() -> list[Any]:
            found: list[Any] = self._api().get_paths_info(
                self._repo, [path], revision=self._resolve_commit(), repo_type="dataset"
            )
            return found

        files = [one for one in self._call_with_retries(self._file_uri(key), request_path_info) if _is_file(one)]
        return _to_entry(key, files[0]) if files else None

    def list(self, prefix: str = "") -> Iterator[Entry]:
        def request_tree() -> list[Any]:
            return list(
                self._api().list_repo_tree(
                    self._repo,
                    self._prefix or None,
                    recursive=True,
                    revision=self._resolve_commit(),
                    repo_type="dataset",
                )
            )

        try:
            found = self._call_with_retries(self.uri, request_tree)
        except KeyMissing:
            return
        inside = len(join_path(self._prefix, "x")) - 1
        entries = (_to_entry(one.path[inside:], one) for one in found if _is_file(one))
        yield from sorted((one for one in entries if one.key.startswith(prefix)), key=lambda one: one.key)

    def folders(self) -> Iterator[str]:
        yield from sorted({key.partition("/")[0] for key in (one.key for one in self.list()) if "/" in key})

    def _refuse_write(self, *given: object, **named: object) -> NoReturn:
        raise BadUri(
            f"{self.uri}: data sets of the Hub cannot be written to",
            remedy="write to a folder or to S3",
        )

    put = put_if_absent = put_buffers = put_file = delete = delete_many = remove_leftovers = age = _refuse_write

    def _path_in_repo(self, key: str) -> str:
        return join_path(self._prefix, check_key(self.uri, key))

    def _file_uri(self, key: str) -> str:
        return f"{self.uri}/{key}"

    def _api(self) -> Any:
        # huggingface_hub reads HF_ENDPOINT at import only; it may have been set later.
        return self._hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))

    def _resolve_commit(self) -> str:
        """Replace the revision by its commit hash, and return the hash. Raises the Hub library's errors."""
        if _COMMIT_HASH.fullmatch(self._revision) is None:
            self._revision = str(self._api().dataset_info(self._repo, revision=self._revision).sha)
        return self._revision

    def _read(self, key: str, headers: dict[str, str]) -> bytes:
        """Return a file's content, or the range that `headers` request."""
        path = self._path_in_repo(key)

        def request_content() -> bytes:
            url = self._hub.hf_hub_url(
                self._repo,
                path,
                repo_type="dataset",
                revision=self._resolve_commit(),
                endpoint=os.environ.get("HF_ENDPOINT"),
            )
            wanted = self._hub.utils.build_hf_headers() | {"Accept-Encoding": "identity"} | headers
            answer = self._hub.get_session().get(url, headers=wanted, follow_redirects=True)
            if answer.status_code == 416:  # the requested range starts after the file's end
                return b""
            self._hub.utils.hf_raise_for_status(answer)
            if headers and answer.status_code != 206:
                raise OSError(f"a request for a byte range got HTTP status {answer.status_code} instead of 206")
            content: bytes = answer.content
            return content

        return self._call_with_retries(self._file_uri(key), request_content)

    def _call_with_retries(self, name: str, request: Callable[[], _T]) -> _T:
        """Return the result of `request`. Retry transient failures until the patience is used up."""

        def request_once() -> _T:
            try:
                return request()
            except (self._hub.errors.HTTPError, OSError, ValueError) as error:
                raise self._translate_error(name, error) from error

        return call_with_retries(request_once, RetryLimit(self._patience_s), get_outage(f"{SCHEME}://{self._repo}"))

    def _translate_error(self, name: str, error: Exception) -> StoreError:
        """Return the StoreError for an error that huggingface_hub raised."""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        errors = self._hub.errors
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.GatedRepoError) or status == 403:
            return AccessDenied(f"no permission for {name}: {reason}", remedy=_TOKEN_REMEDY)
        if isinstance(error, errors.EntryNotFoundError):
            return KeyMissing.for_uri(name)
        if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError) or status == 401:
            return StoreError(
                f"{name}: the Hub has no such data set or revision, or it is not public",
                remedy=f"check the name; {_TOKEN_REMEDY}",
            )
        if isinstance(error, ValueError) or (status is not None and 400 <= status < 500 and status not in (408, 429)):
            return StoreError(f"{name}: {reason}", remedy="check the name of the data set and of the file")
        return StoreUnavailable(
            f"cannot reach {name}: {reason}",
            remedy="check the network (HF_ENDPOINT, HF_HUB_OFFLINE), then start again; or copy the files to a folder",
        )


def _is_file(found: Any) -> bool:
    return hasattr(found, "size")  # folders have no size


def _to_entry(key: str, file: Any) -> Entry:
    """Return the store entry of a file on the Hub. Its version is the hash of its content."""
    return Entry(key, int(file.size), str(file.lfs.sha256 if file.lfs else file.blob_id))


def _import_hub(uri: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise StoreError(
            f"{uri} needs huggingface_hub, which is not installed", remedy="pip install 'maskfleet[hub]'"
        ) from error
    return huggingface_hub
