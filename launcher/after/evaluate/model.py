"""A model to evaluate: a run's checkpoint or a model's folder. It is exported, or fetched, only when its files are
needed, and sent to other machines as the bytes of its files.

A checkpoint's digest is that of its export, so a run and its export share results. An export takes minutes, so the
digest is kept with the results, under a name made of all that decides the export. A complete grid exports nothing.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from checkpoints.layout import CheckpointName
from checkpoints.listing import committed
from data_service.store.base import digest
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from launcher.after.evaluate.cell import KnownModel, Results
from launcher.after.finetune.pretrained import LocalModel, module_folders, open_pretrained
from launcher.errors import RunError, TryAgain
from launcher.runtime.recipe.timeline import recipe_after
from launcher.runtime.run.record import RECORD, Run, open_run
from launcher.runtime.run.sealed import name_of

_DECIDES = ("maskfleet", "transformers", "safetensors")  # how files come out


class Model:
    """A model by its digest.

    Attributes:
        source, step, digest: as in `LocalModel`.
    """

    def __init__(self, results: Results, stack: ExitStack, source: str, step: int | None) -> None:
        """Open a model. `step`: step of a run's checkpoint; None for the newest, or for a folder. Raises as
        `open_pretrained`."""
        self._results, self._stack, self._asked = results, stack, step
        self.source = source
        self._opened: LocalModel | None = None
        commit = _commit(source, step)
        self._name = None if commit is None else _name(*commit)
        known = None if self._name is None else results.known_model(self._name)
        if known is not None:
            self.step, self.digest = known.step, known.weights
            return
        self._opened = stack.enter_context(open_pretrained(source, step))
        self.step, self.digest = self._opened.step, self._opened.digest
        if (
            commit is not None and self._name is not None and commit[1].step == self.step
        ):  # else it was damaged
            known = KnownModel(name=self._name, source=source, step=self.step, weights=self.digest)
            results.keep_model(known)

    def files(self) -> LocalModel:
        """Return the files on this machine's disk, as long as `opened` lasts.

        Raises:
            as `open_pretrained`; TryAgain: the checkpoint is not the one that was evaluated before. What was known of
                that one is forgotten.
        """
        if self._opened is None:
            self._opened = self._stack.enter_context(open_pretrained(self.source, self._asked))
            if self._opened.digest != self.digest:
                assert self._name is not None  # else the digest is of these files
                self._results.forget_model(self._name)
                raise TryAgain(
                    f"{self._opened.name} is another model than when it was evaluated last",
                    remedy="run the same command again",
                )
        return self._opened


@contextmanager
def opened(results: Results, sources: Sequence[str], steps: Sequence[int] | None) -> Iterator[list[Model]]:
    """Provide the models at `sources`: the checkpoints of runs at `steps` (None: all; empty: the newest), and folders.

    Raises the errors of `open_pretrained`, and RunError if `steps` are given but all sources are folders.
    """
    places = [(source, step) for source in sources for step in _steps(source, steps)]
    if steps != [] and all(step is None for _, step in places):
        raise RunError(f"no run among {', '.join(sources)}: folders have no steps", remedy="leave out --step")
    with ExitStack() as stack:
        yield [Model(results, stack, source, step) for source, step in places]


def _steps(source: str, steps: Sequence[int] | None) -> Sequence[int | None]:
    if open_store(source).size(RECORD) is None or steps == []:
        return [None]
    if steps is not None:
        return steps
    return sorted({mark.step for mark in committed(open_run(source).store)})


def _commit(source: str, step: int | None) -> tuple[Run, CheckpointName] | None:
    """Return the run's commit that is meant, be it good or damaged; None if there is none."""
    if open_store(source).size(RECORD) is None:
        return None
    run = open_run(source)
    marks = (mark for mark in committed(run.store) if step in (None, mark.step))
    found = next(marks, None)  # the newest attempt's comes first
    return None if found is None else (run, found)


def _name(run: Run, mark: CheckpointName) -> str | None:
    """Return a digest of everything that the files of the checkpoint's export depend on; the manifest has the hashes of
    the weights. None if the checkpoint has been deleted."""
    try:
        manifest = run.store.get(mark.manifest)
    except KeyMissing:
        return None
    model = recipe_after(run.recipe, mark.step).model
    recipe = [model.model_dump(mode="json"), run.recipe.objective.model_dump(mode="json")]
    versions = [metadata.version(name) for name in _DECIDES]
    return name_of([digest(manifest), recipe, run.record.inputs.tokenizer, versions])


_SENT = (".json", ".safetensors", ".txt", ".model")  # never a pickle, nor what a trainer left


@dataclass(frozen=True)
class Shipped:
    """A model to send to another machine: `pretrained`, whose folder is on its first machine, and the bytes of its
    files by path in the folder."""

    pretrained: LocalModel
    files: Mapping[str, NDArray[np.uint8]]


def pack(pretrained: LocalModel) -> Shipped:
    """Read a model's files into memory, to send them to another machine."""
    files = {
        str(path.relative_to(pretrained.folder)): np.fromfile(path, np.uint8)
        for path in _parts(pretrained.folder)
    }
    return Shipped(pretrained, files)


def unpack(shipped: Shipped, place: Path) -> LocalModel:
    """Write the model into a folder below `place`, unless another process has, and return it. The processes of this
    machine share `place`."""
    folder = place / shipped.pretrained.digest
    if not folder.exists():
        place.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".", dir=place))
        for name, content in shipped.files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            content.tofile(fresh / name)
        try:
            os.rename(fresh, folder)
        except OSError:
            shutil.rmtree(fresh)
            if not folder.is_dir():  # else somebody was faster
                raise
    return replace(shipped.pretrained, folder=folder)


def _parts(folder: Path) -> Iterator[Path]:
    """Yield the paths of the model's files and of the files in the modules of a SentenceTransformer."""
    yield from (path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in _SENT)
    for module in module_folders(folder):
        yield from (path for path in sorted((folder / module).rglob("*")) if path.is_file())
