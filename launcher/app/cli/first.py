"""What is wrong with a command's arguments, seen before anything is read from a network or takes seconds to import.

The commands themselves check all of this again, and more: here only what is cheap.
"""

from collections.abc import Iterable
from pathlib import Path

from launcher.errors import OptionError, RunError

_MODEL = ("run.json", "config.json", "modules.json", "discriminator/config.json")
"""One of them is in the folder of every run and model."""


def require_run(uri: str) -> None:
    """Raises RunError: there is no run. StoreError: the store cannot be read."""
    from data_service.store.open import open_store
    from launcher.runtime.run.outline import RECORD, no_run

    if open_store(uri).size(RECORD) is None:
        raise no_run(uri)


def require_free(uri: str) -> None:
    """Raises RunError: there is a run already, or no run may be called that. StoreError: the store cannot be read."""
    from launcher.runtime.run.outline import free_place

    free_place(uri)


def require_model(source: str) -> None:
    """Raises RunError: on this machine there is no such folder, or neither a run nor a model in it."""
    if "://" in source:
        return
    if not Path(source).is_dir():
        raise RunError(
            f"there is no folder {source}",
            remedy="give a run, or a folder in the transformers or SentenceTransformer format",
        )
    if not any(Path(source, name).is_file() for name in _MODEL):
        raise RunError(
            f"{source} is neither a run nor a model: it has no {_MODEL[0]} and no {_MODEL[1]}",
            remedy="give a run, or a folder in the transformers format",
        )


def require_recipe(name: str) -> None:
    """Raises RecipeError: there is none of that name, or what is there is no YAML."""
    from launcher.runtime.recipe.source import read

    read(name)


def require_run_or_recipe(target: str) -> None:
    """Raises RunError: it is neither a bundled recipe, nor a file, nor a run. StoreError: the store cannot be read."""
    from launcher.runtime.recipe.source import bundled

    if target not in bundled() and not Path(target).is_file():
        require_run(target)


def require_corpora(options: Iterable[str]) -> None:
    """Of [NAME=]URI[@WEIGHT] words. Raises CorpusError: on this machine there is none."""
    from data_service.corpus.manifest import MANIFEST
    from data_service.corpus.manifest_file import no_corpus
    from launcher.runtime.run.corpus_option import CorpusOption

    for option in options:
        uri = CorpusOption.parse(option).uri
        if "://" not in uri and not Path(uri, MANIFEST).is_file():
            raise no_corpus(uri)


def require_assignments(assignments: Iterable[str]) -> None:
    """Raises RecipeError: one that is not KEY=VALUE, with YAML as the value."""
    from launcher.runtime.recipe.document import parse_assignment

    for assignment in assignments:
        parse_assignment(assignment)


def require_file(path: Path | None, option: str) -> None:
    """Raises OptionError: a file is named, and cannot be read."""
    if path is None:
        return
    try:
        path.open("rb").close()
    except OSError as error:
        raise OptionError(
            f"{option} {path} cannot be read: {error.strerror or error}", remedy="give a file that is there"
        ) from error
