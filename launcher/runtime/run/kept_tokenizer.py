"""Stores a copy of the tokenizer with the run, by fingerprint, so that the run does not depend on the original
folder."""

from collections.abc import Iterator

from data_service.corpus.manifest import TOKENIZER_FOLDER
from data_service.errors import TokenizerError
from data_service.store.base import Store
from data_service.store.errors import StoreError
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer, save_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from launcher.runtime.recipe.schema import Recipe

TOKENIZERS_FOLDER = "tokenizers"  # in the run's store; it has a folder for each fingerprint


def keep_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    """Store a copy of `tokenizer` with the run, unless an intact copy is there. Raises StoreError."""
    place = _own_copy_store(store, tokenizer.hash).uri
    try:
        if load_tokenizer(place).hash == tokenizer.hash:
            return
    except TokenizerError:
        pass  # no copy yet, or a damaged one
    save_tokenizer(tokenizer, place)


def find_tokenizer(store: Store, fingerprint: str, recipe: Recipe) -> Tokenizer:
    """Return the tokenizer with this fingerprint, from the first place that has it.

    The places are the copy in the run's `store`, the tokenizer that `recipe` names, and the copies in the corpora. If
    the run's copy is damaged, the others are used until the next start repairs it (`keep_tokenizer`).

    Raises:
        TokenizerError: no place has an intact copy.
        StoreError: the run's store cannot be read; or no readable place has it, and another store cannot be read.
    """
    tried, unread = list[str](), list[StoreError]()
    for place in _candidate_stores(store, fingerprint, recipe):
        try:
            found = load_tokenizer(place.uri)
        except TokenizerError as error:
            tried.append(error.problem)
            continue
        except StoreError as error:
            if not tried:  # the first place, which is in the run's own store
                raise
            unread.append(error)
            continue
        if found.hash == fingerprint:
            return found
        tried.append(f"{place.uri} holds another tokenizer ({found.hash[:12]})")
    if unread:
        raise unread[0]
    raise TokenizerError(
        f"the tokenizer with which the run at {store.uri} was created ({fingerprint[:12]}) cannot be found:\n"
        + "\n".join(f"  {line}" for line in tried),
        remedy=f"restore its files in one of these folders; the run's own folder is "
        f"{_own_copy_store(store, fingerprint).uri}",
    )


_cached_tokenizers: dict[tuple[str, str], Tokenizer] = {}


def cached_tokenizer(store: Store, fingerprint: str, recipe: Recipe) -> Tokenizer:
    """Return `find_tokenizer`, cached: a process that runs several ranks in turn reads the tokenizer only once."""
    key = (store.uri, fingerprint)
    if key not in _cached_tokenizers:
        found = find_tokenizer(store, fingerprint, recipe)
        _cached_tokenizers.clear()
        _cached_tokenizers[key] = found
    return _cached_tokenizers[key]


def _candidate_stores(store: Store, fingerprint: str, recipe: Recipe) -> Iterator[Store]:
    yield _own_copy_store(store, fingerprint)
    yield open_store(recipe.tokenizer.uri)
    for source in recipe.corpus.sources.values():
        yield open_store(source.uri).with_prefix(TOKENIZER_FOLDER)


def _own_copy_store(store: Store, fingerprint: str) -> Store:
    return store.with_prefix(f"{TOKENIZERS_FOLDER}/{fingerprint}")
